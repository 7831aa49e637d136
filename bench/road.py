"""Decode steps by TorchSession beside the kernels alone and beside HTTP: `python -m bench.road`.

On one GPU without and with MPS, and with the caller on a second GPU where there is one. The MPS
daemon is this run's own, and is stopped with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from attnd import Client

from bench.cases.loads import Decode
from bench.driver.servers import ROOT, Server, attnd
from bench.driver.ways import Target, Worker
from bench.provenance import RESULTS, provenance, write_results
from bench.steps import HEADS, LAYERS, PAGE_SIZE, short
from bench.tables import measured

SHAPES: Final = ((64, 4096), (16, 1024), (16, 128))
STEPS: Final = 40
SPARE_PAGES: Final = 16
"""Of each sequence, for the steps' tokens."""
PLACES: Final = ("time_sliced", "mps", "other_gpu")
NAMES: Final = {
    "time_sliced": "one GPU, time-sliced",
    "mps": "one GPU, MPS",
    "other_gpu": "two GPUs",
}
CONTROL: Final = "nvidia-cuda-mps-control"
PACKAGES: Final = ("attnd", "attnd-client", "cupy-cuda13x", "torch", "numpy")
LIMIT_S: Final = 6.0


@contextmanager
def placed(place: str) -> Iterator[int]:
    """The caller's device, with an MPS daemon for this block where the place wants one."""
    if place != "mps":
        yield int(place == "other_gpu")
        return
    with TemporaryDirectory(prefix="attnd-mps-") as directory:
        own = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(directory, "pipe")),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(directory, "log")),
        }
        os.environ.update(own)
        try:
            subprocess.run([CONTROL, "-d"], check=True)
            time.sleep(1.0)
            yield 0
        finally:
            subprocess.run([CONTROL], input=b"quit\n", check=False)
            for name in own:
                del os.environ[name]


def measure(places: Sequence[str], shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Every shape at every place."""
    rows, device = [], ""
    for place in places:
        with placed(place) as caller:
            for batch, kv_len in shapes:
                row, device = measure_row(place, caller, batch, kv_len)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return {"device": device, "steps": STEPS, "layers": LAYERS, "rows": rows}


def measure_row(place: str, caller: int, batch: int, kv_len: int) -> tuple[dict[str, Any], str]:
    """The kernels alone, then the service by steps and by HTTP."""
    names = tuple(f"s{number}" for number in range(batch))
    load = Decode(names, HEADS, kv_len, LAYERS, LAYERS, appends=True)
    with Worker() as worker:
        worker.open("kernels", Target("kernels"), load)
        worker.loop("kernels", 8 * LAYERS, LIMIT_S)
        alone = worker.loop("kernels", 16 * LAYERS, LIMIT_S)
    pages = batch * (kv_len // PAGE_SIZE + SPARE_PAGES)
    options = (*HEADS.pool(LAYERS), "--pool.num-pages", str(pages))
    with attnd(*options, kind="cuda") as server:
        found = by_steps(server, caller, batch, kv_len)
        http = by_http(server, load)
        with Client(f"http://127.0.0.1:{server.port}") as client:
            device = client.info().device
    row = {
        "place": place,
        "batch": batch,
        "kv_len": kv_len,
        "kernels_us": round(median(one.seconds for one in alone.samples) * 1e6, 2),
        **found,
        "http_us": http,
    }
    return row, device


def by_steps(server: Server, device: int, batch: int, kv_len: int) -> dict[str, Any]:
    """What `bench.driver.torch_steps` finds."""
    numbers = {
        "device": device,
        "batch": batch,
        "kv-len": kv_len,
        "heads": HEADS.num_qo,
        "layers": LAYERS,
        "steps": STEPS,
    }
    asked = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bench.driver.torch_steps", "--socket", server.socket, *asked]
    told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def by_http(server: Server, load: Decode) -> float:
    """Microseconds of a layer by `attnd.Client`."""
    with Worker() as worker:
        worker.open("client", Target("client", server.port, server.socket), load)
        run = worker.loop("client", 4 * LAYERS, LIMIT_S)
    return round(median(one.seconds for one in run.samples) * 1e6, 1)


def table(results: Mapping[str, Any]) -> str:
    """A layer of a step at every place, as Markdown."""
    heads = (
        "sequences",
        "where",
        "hand-over µs",
        "kernels alone µs",
        "steps µs",
        "caller's graph µs",
        "beside the kernels",
        "Client µs",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in sorted(results["rows"], key=lambda row: (-row["batch"], -row["kv_len"])):
        alone = row["kernels_us"]
        steps, graph = row["steps"]["layer_us"], row["graph"]["layer_us"]
        best = min(steps, graph)
        lines.append(
            f"| {row['batch']} x {row['kv_len']} | {NAMES[row['place']]} | "
            f"{row['hand_over_us']:.0f} | {alone:.1f} | {steps:.1f} | "
            f"{graph:.1f} | {best / alone:.2f} x, + {best - alone:.0f} | {row['http_us']:.0f} |"
        )
    told = (
        measured(results)[:-1] + "; the median step's "
        f"share of a layer: {results['layers']} layers, {HEADS.num_qo}/{HEADS.num_kv} heads of "
        f"{HEADS.dim}, fp16, k and v appended, copies of q, k, v and o by the caller included."
    )
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.road")
    parser.add_argument("--places", default=",".join(PLACES), help="comma-separated")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results = provenance(PACKAGES) | measure(asked.places.split(","), SHAPES)
    print(f"\n{table(results)}")
    write_results(asked.out or RESULTS / f"road-{short(results['device'])}.json", results)


if __name__ == "__main__":
    main()
