"""Decode steps of a large model on a GPU: `python -m bench.service --backend cuda`.

32 query and 8 KV heads of 128, fp16, 32 layers; every layer's call appends k and v and decodes.

- From host memory: 64 sequences of 4k tokens and 16 of 1k, by each way in, beside the kernels alone
  and the backend called in one process. All ways take turns; the tokens that a way appended are
  truncated before the next.
- From the GPU: steps by TorchSession, with the caller on the engine's GPU, time-sliced and under
  MPS, and on a second GPU. This run starts and stops its own MPS daemon. `--places` chooses places.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from attnd import Client, Session

from bench.cases.loads import Decode, Heads, fill
from bench.driver.calls import Run
from bench.driver.servers import attnd
from bench.driver.ways import Kind, Target
from bench.driver.worker import Worker
from bench.report.provenance import RESULTS, ROOT, Results, device_name, provenance, publish
from bench.report.tables import markdown, with_stamp

HEADS: Final = Heads(num_qo=32, num_kv=8, dim=128)
LAYERS: Final = 32
PAGE_SIZE: Final = 16
SHAPES: Final = ((64, 4096), (16, 1024))
STEPS: Final = 8
"""Steps of each way in each repeat; with the warm-up they fill less than a page."""
PLACED_SHAPES: Final = (*SHAPES, (16, 128))
PLACED_STEPS: Final = 40
SPARE_PAGES: Final = 16
"""Pages of each sequence for the tokens of placed steps."""
LIMIT_S: Final = 20.0
FILL_ARENA: Final = 160 * 2**20
PACKAGES: Final = ("attnd", "attnd-client", "cupy-cuda13x", "torch", "numpy", "uvicorn", "uvloop")
KINDS: Final[tuple[Kind, ...]] = ("http", "client", "road", "session", "session_in_place")
ALONE: Final[tuple[Kind, ...]] = ("process", "kernels")
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
PLACES: Final = {
    "time_sliced": "one GPU, time-sliced",
    "mps": "one GPU, MPS",
    "embedded": "one process",
    "other_gpu": "two GPUs",
}
MPS_CONTROL: Final = "nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True)
class Side:
    """One version's service with its sequences, and the ways into it with their drivers."""

    client: Client
    load: Decode
    ways: Mapping[str, Worker]

    def undo(self) -> None:
        """Truncate the tokens that steps appended."""
        for name in self.load.names:
            self.client.truncate(name, self.load.kv_len)


def measure_steps(chosen: argparse.Namespace) -> None:
    """Measure both tables and write them to service-<device>.json and road-<device>.json."""
    results = host_steps(chosen.before, 2 if chosen.quick else 5)
    device = device_name(results["device"])
    publish(results, table(results), RESULTS / f"service-{device}.json", chosen)
    places = [place for place in chosen.places.split(",") if place]
    if "other_gpu" in places and torch.cuda.device_count() < 2:
        print("other_gpu left out: this machine has one GPU")
        places.remove("other_gpu")
    if places:
        by_place = placed_steps(places)
        if chosen.out:
            chosen.out = chosen.out.with_stem(f"{chosen.out.stem}-places")
        publish(by_place, placed_table(by_place), RESULTS / f"road-{device}.json", chosen)


def host_steps(before: Path | None, repeats: int) -> Results:
    """Every shape by every way, of one version or two."""
    stamp = provenance(PACKAGES)
    rows, device = [], ""
    with Worker() as worker, ExitStack() as stack:
        older = None if before is None else stack.enter_context(Worker(before))
        for batch, kv_len in SHAPES:
            with ExitStack() as pools:
                sides = [open_side(pools, "", ROOT, worker, worker, (batch, kv_len))]
                if before is not None and older is not None:
                    old = open_side(pools, "before_", before, worker, older, (batch, kv_len))
                    sides.append(old)
                device = sides[0].client.info().device
                rows.append(measure_shape(sides, worker, repeats))
                print(json.dumps(rows[-1]), flush=True)
    return stamp | {"device": device, "steps": STEPS, "repeats": repeats, "rows": rows}


def open_side(
    stack: ExitStack,
    prefix: str,
    root: Path,
    worker: Worker,
    package: Worker,
    shape: tuple[int, int],
) -> Side:
    """Start a version and fill its sequences; `package` drives its client package."""
    batch, kv_len = shape
    pages = batch * (kv_len // PAGE_SIZE + 1)
    options = (*HEADS.pool(LAYERS), "--pool.num-pages", str(pages))
    server = stack.enter_context(attnd(*options, root=root, kind="cuda"))
    if prefix:  # another version's road may differ
        with Client(server.url, timeout=120.0) as client:
            names = fill(client, batch, HEADS, kv_len, LAYERS)
    else:
        with Session(server.socket, timeout=120.0, arena_bytes=FILL_ARENA) as session:
            names = fill(session, batch, HEADS, kv_len, LAYERS)
    load = Decode(names, HEADS, kv_len, LAYERS, LAYERS, appends=True)
    ways = {}
    for kind in ("http", "client") if prefix else KINDS:
        driver = package if kind in ("client", "session", "session_in_place") else worker
        driver.open(prefix + kind, Target(kind, server.port, server.socket), load)
        ways[prefix + kind] = driver
    return Side(stack.enter_context(Client(server.url)), load, ways)


def measure_shape(sides: Sequence[Side], worker: Worker, repeats: int) -> dict[str, Any]:
    """All ways in turn, in every repeat; the first turn of each is not counted."""
    load = sides[0].load
    for kind in ALONE:
        worker.open(kind, Target(kind), load)
    runs: dict[str, list[Run]] = {}
    for repeat in range(repeats + 1):
        for side in sides:
            for name, driver in side.ways.items():
                run = driver.loop(name, STEPS * LAYERS, LIMIT_S)
                side.undo()
                runs.setdefault(name, []).append(run)
        for kind in ALONE:
            runs.setdefault(kind, []).append(worker.loop(kind, STEPS * LAYERS, LIMIT_S))
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


def table(results: Results) -> str:
    """Milliseconds of a layer of a step by every way."""
    ways = [name for name in NAMES if name in results["rows"][0]["ways"]]
    rows = []
    for row in results["rows"]:
        kernels = row["ways"]["kernels"]["layer_ms"]
        cells = [f"{row['batch']} x {row['kv_len']}"]
        for name in ways:
            ms = row["ways"][name]["layer_ms"]
            cells.append(f"{ms:.3f}" if name == "kernels" else f"{ms:.3f} ({ms / kernels:.2f} x)")
        rows.append(cells)
    note = (
        f"a layer's share of the median step: {LAYERS} layers, {HEADS.num_qo}/{HEADS.num_kv} heads "
        f"of {HEADS.dim}, fp16, k and v appended; in brackets: beside the kernels"
    )
    return with_stamp(
        markdown(("sequences", *(f"{NAMES[name]} ms" for name in ways)), rows), results, note
    )


@contextmanager
def placed(place: str) -> Iterator[int]:
    """The caller's device; a place "mps" has an MPS daemon for this block."""
    if place != "mps":
        yield int(place == "other_gpu")
        return
    with TemporaryDirectory(prefix="attnd-mps-") as directory:
        kinds = ("PIPE", "LOG")
        folders = {f"CUDA_MPS_{kind}_DIRECTORY": str(Path(directory, kind)) for kind in kinds}
        os.environ.update(folders)
        try:
            subprocess.run([MPS_CONTROL, "-d"], check=True)
            time.sleep(1.0)
            yield 0
        finally:
            subprocess.run([MPS_CONTROL], input=b"quit\n", check=False)
            for name in folders:
                del os.environ[name]


def placed_steps(places: Sequence[str]) -> Results:
    """Every shape with the caller at every place."""
    stamp = provenance(PACKAGES)
    rows, device = [], ""
    for place in places:
        with placed(place) as caller:
            for batch, kv_len in PLACED_SHAPES:
                row, device = placed_row(place, caller, batch, kv_len)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return stamp | {"device": device, "steps": PLACED_STEPS, "layers": LAYERS, "rows": rows}


def placed_row(place: str, caller: int, batch: int, kv_len: int) -> tuple[dict[str, Any], str]:
    """The kernels alone, then the service by TorchSession and by HTTP; and the device's name."""
    names = tuple(f"s{number}" for number in range(batch))
    load = Decode(names, HEADS, kv_len, LAYERS, LAYERS, appends=True)
    kernels_us = median_us(Target("kernels"), load, 16 * LAYERS)
    pages = batch * (kv_len // PAGE_SIZE + SPARE_PAGES)
    options = (*HEADS.pool(LAYERS), "--pool.num-pages", str(pages))
    row = {"place": place, "batch": batch, "kv_len": kv_len, "kernels_us": round(kernels_us, 2)}
    if place == "embedded":
        found = torch_steps(("--embedded", *options), caller, batch, kv_len)
        return row | {"http_us": 0.0} | found, str(found["device"])
    with attnd(*options, kind="cuda") as server:
        steps = torch_steps(("--socket", server.socket), caller, batch, kv_len)
        http_us = median_us(Target("client", server.port, server.socket), load, 4 * LAYERS)
        with Client(server.url) as client:
            device = client.info().device
    return row | steps | {"http_us": round(http_us, 1)}, device


def median_us(target: Target, load: Decode, count: int) -> float:
    """The median microseconds of a layer's call, by a new process."""
    with Worker() as worker:
        worker.open("way", target, load)
        run = worker.loop("way", count, LIMIT_S)
    return median(sample.seconds for sample in run.samples) * 1e6


def torch_steps(engine: Sequence[str], device: int, batch: int, kv_len: int) -> dict[str, Any]:
    """Run bench.driver.torch_steps with an engine, and return its figures."""
    numbers = {"device": device, "batch": batch, "kv-len": kv_len, "steps": PLACED_STEPS}
    numbers |= {"heads": HEADS.num_qo, "layers": LAYERS}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    module = ["-m", "bench.driver.torch_steps", *options, *engine]
    done = subprocess.run(
        [sys.executable, *module], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def placed_table(results: Results) -> str:
    """Microseconds of a layer of a step by the caller's place."""
    rows = []
    for row in sorted(results["rows"], key=lambda row: (-row["batch"], -row["kv_len"])):
        alone = row["kernels_us"]
        steps, graph = row["steps"]["layer_us"], row["graph"]["layer_us"]
        best = min(steps, graph)
        cells = [f"{row['batch']} x {row['kv_len']}", PLACES[row["place"]]]
        cells += [f"{row['hand_over_us']:.0f}", *(f"{us:.1f}" for us in (alone, steps, graph))]
        cells += [f"{best / alone:.2f} x, + {best - alone:.0f}", f"{row['http_us']:.0f}"]
        rows.append(cells)
    head = ["sequences", "caller", "hand-over µs", "kernels µs", "steps µs"]
    head += ["graph µs", "to kernels", "Client µs"]
    note = (
        f"the median step's share of a layer: {results['layers']} layers, {HEADS.num_qo}/"
        f"{HEADS.num_kv} heads of {HEADS.dim}, fp16, k and v appended, the caller's copies of q, "
        "k, v and o included"
    )
    return with_stamp(markdown(head, rows, keys=2), results, note)
