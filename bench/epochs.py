"""What ranks and their epochs cost: calls about one sequence with `ranks: 2` and without, in turn.

Two CPU engines, and doors' routers in this process. A decode that appends is a change, which a door
may make in its own epoch only: one door that writes alone has claimed it once, two that take turns
claim it anew each time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, Final

import numpy as np

from config.sections import Settings
from config.settings import load_settings
from service.cluster.membership.local_engines import LocalEngines, local_engines
from service.cluster.routing.router import Router
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.image.writing import image
from service.operations.table import BY_NAME
from service.tenants import OPEN

HEADS: Final = 2
DIM: Final = 64
BEGUN: Final = 256
"""Tokens that each sequence has at first."""
IN_A_ROW: Final = 25
BLOCKS: Final = 8
"""Calls of each kind one after another, and how often all kinds have their turn before the
sequences are made anew, so that those are as long on average."""
SETTINGS: Final = [
    *("--backend.kind", "cpu"),
    *("--pool.num-layers", "1"),
    *("--pool.num-kv-heads", str(HEADS)),
    *("--pool.head-dim", str(DIM)),
    *("--pool.num-pages", "512"),
    *("--pool.dtype", "fp32"),
    *("--log.level", "warning"),
]
WAYS: Final = {
    "decode": (("one engine", "ranks: 2"), False),
    "decode that appends": (("one engine", "ranks: 2"), True),
    "decode that appends, by two doors in turn": (("one engine", "ranks: 2"), True),
}
"""What is called, of which sequences, and whether with k and v."""


async def ask(router: Router, name: str, fields: dict[str, Any], **arrays: Any) -> float:
    """Seconds of one call that must succeed, the body's way into its slot not counted."""
    slot, length = await router.lay(image(REQUEST, dump_json(fields), arrays))
    begun = time.perf_counter()
    answered, place = await router.call(BY_NAME[name], slot, length, 2**26, 0, bytes(16), OPEN)
    spent = time.perf_counter() - begun
    if answered.status >= 300:
        raise RuntimeError(bytes(answered.image)[:400])
    router.give_back(place)
    router.give_back(slot)
    return spent


async def round_of(routers: list[Router], spent: dict[tuple[str, str], list[float]]) -> None:
    """Calls of every kind, one after another, on sequences of their own."""
    first = routers[0]
    rows = np.zeros((BEGUN, HEADS, DIM), np.float32)
    kv, q = {"k": rows[:1], "v": rows[:1]}, rows[:1]
    names: dict[tuple[str, str], str] = {}
    for number, (call, (ways, _)) in enumerate(WAYS.items()):
        for way in ways:
            name = names[call, way] = f"{way[0]}-{number}"
            ranks = {"ranks": 2} if way == "ranks: 2" else {}
            await ask(first, "create_sequences", {"sequences": [{"id": name} | ranks]})
            whole = {"layer": 0, "sequences": [name], "append_indptr": [0, BEGUN]}
            await ask(first, "append", whole, k=rows, v=rows)
    for _ in range(BLOCKS):
        for (call, way), name in names.items():
            given = kv if WAYS[call][1] else {}
            fields = {"layer": 0, "sequences": [name]}
            for turn in range(IN_A_ROW):
                router = routers[turn % 2] if "in turn" in call else first
                spent[call, way].append(await ask(router, "decode", fields, q=q, **given))
    await ask(first, "delete_sequences", {"ids": list(names.values())})


async def measure(
    engines: LocalEngines, settings: Settings, seconds: float
) -> list[dict[str, Any]]:
    routers = [Router(settings.server) for _ in range(2)]
    spent: dict[tuple[str, str], list[float]] = {
        (call, way): [] for call, (ways, _) in WAYS.items() for way in ways
    }
    try:
        for router in routers:
            await router.connect(str(engines.members), "bench", engines.secret)
            while len(router.members.engines) < 2:
                await asyncio.sleep(0.05)
        await round_of(routers, {key: [] for key in spent})  # as warm as it will be
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            await round_of(routers, spent)
    finally:
        for router in routers:
            router.close()
    rows = []
    for call, (ways, _) in WAYS.items():
        row: dict[str, Any] = {"call": call, "calls": len(spent[call, ways[0]])}
        row |= {
            f"{way} p50 ms": round(1e3 * statistics.median(spent[call, way]), 3) for way in ways
        }
        rows.append(row)
    return rows


def epochs(seconds: float) -> list[dict[str, Any]]:
    """A row for each call, of about so many seconds in all."""
    import uvloop

    settings = load_settings(SETTINGS)
    with local_engines(2, settings) as engines:
        return uvloop.run(measure(engines, settings, seconds))
