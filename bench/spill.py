"""What a sequence of 65,536 tokens costs its callers when it outgrows its engine, one GiB on two
CPU engines: the append that began it, those after it, and other calls at that engine meanwhile.

    python -m bench.spill
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import numpy as np

from bench.epochs import ask
from config.sections import Settings
from config.settings import load_settings
from service.cluster.local import LocalEngines, local_engines
from service.cluster.router import Router

LAYERS: Final = 4
HEADS: Final = 8
DIM: Final = 128
PAGE: Final = 16
TOKENS: Final = 65536
PAGES: Final = TOKENS // PAGE + 64
AT_ONCE: Final = 4096
POLL_S: Final = 0.5
"""Until a router has heard what its engines have."""
SETTINGS: Final = [
    *("--backend.kind", "cpu"),
    *("--pool.num-layers", str(LAYERS)),
    *("--pool.num-kv-heads", str(HEADS)),
    *("--pool.head-dim", str(DIM)),
    *("--pool.page-size", str(PAGE)),
    *("--pool.num-pages", str(PAGES)),
    *("--pool.dtype", "fp16"),
    *("--log.level", "warning"),
]


async def append(router: Router, name: str, layer: int, count: int) -> float:
    rows = np.ones((count, HEADS, DIM), np.float16)
    fields = {"layer": layer, "sequences": [name], "append_indptr": [0, count]}
    return await ask(router, "append", fields, k=rows, v=rows)


async def fill(router: Router) -> None:
    """A long sequence, and another that takes the rest of its engine's pages."""
    await ask(router, "create_sequences", {"sequences": [{"id": "long"}]})
    for layer in range(LAYERS):
        for _ in range(TOKENS // AT_ONCE):
            await append(router, "long", layer, AT_ONCE)
    await ask(
        router, "create_sequences", {"sequences": [{"id": "other", "parent": "long", "length": 0}]}
    )
    await append(router, "other", 0, (PAGES - TOKENS // PAGE) * PAGE)
    await asyncio.sleep(POLL_S)


async def look(router: Router, until: asyncio.Event) -> list[float]:
    """Other calls at the same engine."""
    spent = []
    while not until.is_set():
        spent.append(await ask(router, "get_sequence", {"id": "other"}))
        await asyncio.sleep(0.002)
    return spent


async def measure(engines: LocalEngines, settings: Settings) -> dict[str, Any]:
    router, done = Router(settings.server, spill=2), asyncio.Event()
    try:
        await router.connect(str(engines.members), "bench", engines.secret)
        while len(router.members.engines) < 2:
            await asyncio.sleep(0.05)
        await fill(router)
        looking = asyncio.ensure_future(look(router, done))
        begun = time.perf_counter()
        await append(router, "long", 0, PAGE)
        spilled = time.perf_counter() - begun
        done.set()
        after = [await append(router, "long", 0, PAGE) for _ in range(16)]
        return {
            "the append that spilled, s": round(spilled, 2),
            "appends after it, p50 ms": round(1e3 * float(np.median(after)), 1),
            "other calls meanwhile, longest ms": round(1e3 * max(await looking), 1),
            "dealt out": sum(router.spills.done.values()),
        }
    finally:
        router.close()


def main() -> None:
    settings = load_settings(SETTINGS)
    with local_engines(2, settings) as engines:
        for what, value in asyncio.run(measure(engines, settings)).items():
            print(f"{what}: {value}")


if __name__ == "__main__":
    main()
