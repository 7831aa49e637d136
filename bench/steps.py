"""Decode steps of a large model on a GPU, by each way in and by the kernels alone.

`python -m bench.service --backend cuda`: 64 sequences of 4k and 16 of 1k, 32 query and 8 KV heads
of 128, fp16, 32 layers; every layer's call appends k and v and decodes. All ways take turns in
every repeat; the steps of one turn are taken back before the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client, Session

from bench.cases.loads import Decode, Heads, fill
from bench.driver.connections import Run
from bench.driver.servers import Server, attnd
from bench.driver.ways import Kind, Target, Worker
from bench.provenance import RESULTS, provenance, write_results
from bench.tables import measured

HEADS: Final = Heads(num_qo=32, num_kv=8, dim=128)
LAYERS: Final = 32
SHAPES: Final = ((64, 4096), (16, 1024))
STEPS: Final = 8
"""Of each way in each repeat; with the untimed one they fill less than a page."""
PAGE_SIZE: Final = 16
LIMIT_S: Final = 20.0
FILL_ARENA: Final = 160 * 2**20
PACKAGES: Final = ("attnd", "cupy-cuda13x", "numpy", "uvicorn", "uvloop", "httptools")
WAYS: Final[dict[str, Kind]] = {
    "http": "http",
    "client": "client",
    "road": "road",
    "session": "session",
    "session_in_place": "session_in_place",
}
ALONE: Final[dict[str, Kind]] = {"process": "process", "kernels": "kernels"}
NAMES: Final = {
    "kernels": "kernels alone",
    "process": "in one process",
    "session_in_place": "Session, in place",
    "session": "Session",
    "road": "frames",
    "http": "raw HTTP",
    "client": "Client",
    "before_http": "raw HTTP before",
    "before_client": "Client before",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One version's service with its sequences, and whoever drives the ways into it."""

    client: Client
    load: Decode
    ways: Mapping[str, tuple[Worker, Target]]

    def take_back(self) -> None:
        """What the steps have appended."""
        for name in self.load.names:
            self.client.truncate(name, self.load.kv_len)


def measure_steps(before: Path | None, out: Path | None, repeats: int) -> None:
    """Measure, print the table, and write bench/results/service-<device>.json."""
    told = provenance(PACKAGES)
    with Worker() as worker, ExitStack() as stack:
        older = None if before is None else stack.enter_context(Worker(before))
        rows, device = [], ""
        for batch, kv_len in SHAPES:
            with ExitStack() as pools:
                sides = [now_side(pools, worker, batch, kv_len)]
                if before is not None and older is not None:
                    sides.append(old_side(pools, worker, older, before, batch, kv_len))
                device = sides[0].client.info().device
                rows.append(measure_shape(sides, worker, repeats))
                print(line(rows[-1]), flush=True)
    results = told | {"device": device, "steps": STEPS, "repeats": repeats, "rows": rows}
    print(f"\n{table(results)}")
    write_results(out or RESULTS / f"service-{short(device)}.json", results)


def pool_options(batch: int, kv_len: int) -> tuple[str, ...]:
    """A pool with a page more for each sequence."""
    pages = batch * (kv_len // PAGE_SIZE + 1)
    return (*HEADS.pool(LAYERS), "--pool.num-pages", str(pages))


def now_side(stack: ExitStack, worker: Worker, batch: int, kv_len: int) -> Side:
    """This version, filled over the road."""
    server = stack.enter_context(attnd(*pool_options(batch, kv_len), kind="cuda"))
    with Session(server.socket, timeout=120.0, arena_bytes=FILL_ARENA) as session:
        names = fill(session, batch, HEADS, kv_len, LAYERS)
    return side(stack, worker, worker, server, names, kv_len, WAYS)


def old_side(
    stack: ExitStack, worker: Worker, older: Worker, root: Path, batch: int, kv_len: int
) -> Side:
    """Another version, filled over HTTP."""
    server = stack.enter_context(attnd(*pool_options(batch, kv_len), root=root, kind="cuda"))
    with Client(f"http://127.0.0.1:{server.port}", timeout=120.0) as client:
        names = fill(client, batch, HEADS, kv_len, LAYERS)
    ways: dict[str, Kind] = {"before_http": "http", "before_client": "client"}
    return side(stack, worker, older, server, names, kv_len, ways)


def side(
    stack: ExitStack,
    worker: Worker,
    package: Worker,
    server: Server,
    names: tuple[str, ...],
    kv_len: int,
    ways: Mapping[str, Kind],
) -> Side:
    """A version's ways, opened; `package` drives those of its client package."""
    load = Decode(names, HEADS, kv_len, LAYERS, LAYERS, appends=True)
    drivers = {}
    for name, kind in ways.items():
        driver = package if kind == "client" else worker
        drivers[name] = (driver, Target(kind, server.port, server.socket))
        driver.open(name, drivers[name][1], load)
    client = stack.enter_context(Client(f"http://127.0.0.1:{server.port}"))
    return Side(client, load, drivers)


def measure_shape(sides: Sequence[Side], worker: Worker, repeats: int) -> dict[str, Any]:
    """All ways in turn, in every repeat; a first turn of each is not counted."""
    load = sides[0].load
    for name, kind in ALONE.items():
        worker.open(name, Target(kind), load)
    runs: dict[str, list[Run]] = {}
    for repeat in range(repeats + 1):
        for one in sides:
            for name, (driver, _) in one.ways.items():
                found = driver.loop(name, STEPS * LAYERS, LIMIT_S)
                one.take_back()
                runs.setdefault(name, []).append(found)
        for name in ALONE:
            runs.setdefault(name, []).append(worker.loop(name, STEPS * LAYERS, LIMIT_S))
        if repeat == 0:
            runs.clear()
    return {
        "batch": len(load.names),
        "kv_len": load.kv_len,
        "num_layers": LAYERS,
        **asdict(HEADS),
        "ways": {name: figures(runs[name]) for name in NAMES if name in runs},
    }


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds: a layer's share of the median step, and of single calls."""
    every = [sample for run in runs for sample in run.samples]
    steps = [step for run in runs for step in whole_steps(run)]
    p50, p99 = np.percentile([sample.seconds for sample in every], (50, 99))
    return {
        "layer_ms": round(median(steps) / LAYERS * 1e3, 4),
        "p50_ms": round(float(p50) * 1e3, 4),
        "p99_ms": round(float(p99) * 1e3, 4),
        "backend_p50_ms": round(median(sample.backend_s for sample in every) * 1e3, 4),
    }


def whole_steps(run: Run) -> Iterator[float]:
    """Seconds of each step that went through all layers."""
    seconds = [sample.seconds for sample in run.samples]
    for first in range(0, len(seconds) - LAYERS + 1, LAYERS):
        yield sum(seconds[first : first + LAYERS])


def line(row: Mapping[str, Any]) -> str:
    """One shape as it is done."""
    ways = "  ".join(f"{name} {way['layer_ms']:.4f}" for name, way in row["ways"].items())
    return f"{row['batch']} x {row['kv_len']}: ms a layer: {ways}"


def table(results: Mapping[str, Any]) -> str:
    """What a layer of a step takes, as Markdown."""
    rows = results["rows"]
    ways = [name for name in NAMES if name in rows[0]["ways"]]
    lines = [
        f"| sequences | {' | '.join(f'{NAMES[name]} ms' for name in ways)} |",
        f"|---{'|---' * len(ways)}|",
    ]
    for row in rows:
        kernels = row["ways"]["kernels"]["layer_ms"]
        cells = []
        for name in ways:
            ms = row["ways"][name]["layer_ms"]
            cells.append(f"{ms:.3f}" if name == "kernels" else f"{ms:.3f} ({ms / kernels:.2f} x)")
        lines.append(f"| {row['batch']} x {row['kv_len']} | {' | '.join(cells)} |")
    told = (
        measured(results)[:-1] + "; a layer's share of "
        f"the median step: {LAYERS} layers, {HEADS.num_qo}/{HEADS.num_kv} heads of {HEADS.dim}, "
        "fp16, k and v appended; in brackets beside the kernels."
    )
    return "\n".join([*lines, "", told])


def short(device: str) -> str:
    """`h200` of "NVIDIA H200"."""
    found = re.search(r"\b[A-Z]+\d+\w*", device)
    return (found[0] if found else device.replace(" ", "-")).lower()


if __name__ == "__main__":
    measure_steps(None, None, 5)
