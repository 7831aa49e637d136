"""Small decodes beside one neighbour's long work: what they wait, with it and without.

`python -m bench.fairness` prints a table and writes bench/results/fairness-cpu.json. One caller
decodes 8 KiB over 64 tokens, one call after another; another one sends 46 MiB prefills or long
ragged prefills back to back, over HTTP or over the road. Long work is cut into slices of
`engine.slice_ms`; the 99th percentile of the small decodes is to be within five of them.
`--before DIR` measures another version in the same run, over HTTP.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client

from bench.cases.loads import Decode, Heads, Load, Prefill, Ragged, fill
from bench.driver.connections import Run
from bench.driver.servers import Server, attnd
from bench.driver.ways import Target, Worker
from bench.provenance import RESULTS, provenance, write_results
from bench.tables import measured

HEADS: Final = Heads(num_qo=32, num_kv=8, dim=128)
SMALL_KV: Final = 64
PREFILL_ROWS: Final = 46 * 2**20 // (HEADS.num_qo * HEADS.dim * 2)
PREFILL_KV: Final = 1024
RAGGED: Final = Ragged(Heads(num_qo=1, num_kv=1, dim=64), num_rows=16384)
SLICE_MS: Final = 20.0
MOST_SLICES: Final = 5
AHEAD_S: Final = 1.0
"""The neighbour has begun that long before."""
PACKAGES: Final = ("attnd", "uvicorn", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Version:
    """A service under measurement and the ways into it."""

    name: str
    targets: Mapping[str, Target]
    small: Decode
    neighbours: Mapping[str, Load]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="a rough look, written only with --out"
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="another version, beside it")
    parser.add_argument("--out", type=Path, help="where to write, in place of bench/results")
    chosen = parser.parse_args(argv)
    told = provenance(PACKAGES)
    rows = list(measure(chosen.before, 5.0 if chosen.quick else 20.0))
    results = told | {"slice_ms": SLICE_MS, "most_slices": MOST_SLICES, "rows": rows}
    print(f"\n{table(results)}")
    if chosen.out or not chosen.quick:
        write_results(chosen.out or RESULTS / "fairness-cpu.json", results)


def measure(before: Path | None, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each version, way and neighbour; the one without neighbour comes first."""
    with ExitStack() as stack:
        small, long = stack.enter_context(Worker()), stack.enter_context(Worker())
        pool = HEADS.pool()
        versions = []
        if before is not None:
            versions.append(version("before", stack.enter_context(attnd(*pool, root=before))))
        sliced = ("--engine.slice-ms", str(SLICE_MS))
        versions.append(version("now", stack.enter_context(attnd(*pool, *sliced))))
        for one in versions:
            for way, target in one.targets.items():
                for neighbour, load in one.neighbours.items():
                    row: dict[str, Any] = {"version": one.name, "way": way, "neighbour": neighbour}
                    small.open("small", target, one.small)
                    long.open("long", target, load)
                    row |= beside(small, long, seconds)
                    print(line(row), flush=True)
                    yield row


def version(name: str, server: Server) -> Version:
    """Fill the pool of a service."""
    targets = {"http": Target("http", server.port)}
    if server.socket:
        targets["road"] = Target("road", socket=server.socket)
    with Client(f"http://127.0.0.1:{server.port}") as client:
        small = Decode(fill(client, 1, HEADS, SMALL_KV), HEADS, SMALL_KV, count=4)
        (long,) = fill(client, 1, HEADS, PREFILL_KV)
    prefill = Prefill(long, HEADS, PREFILL_ROWS)
    return Version(name, targets, small, {"46 MiB prefills": prefill, "ragged prefills": RAGGED})


def beside(small: Worker, long: Worker, seconds: float) -> dict[str, float]:
    """The small decodes alone, then beside the neighbour; and the neighbour's own calls."""
    most = 1_000_000
    alone = small.loop("small", most, seconds / 4)
    long.begin("loop", "long", most, seconds + AHEAD_S)
    time.sleep(AHEAD_S)
    run = small.loop("small", most, seconds)
    neighbour: Run = long.end()
    p50, p99 = percentiles(run)
    alone_p50, alone_p99 = percentiles(alone)
    return {
        "alone_p50_ms": alone_p50,
        "alone_p99_ms": alone_p99,
        "p50_ms": p50,
        "p99_ms": p99,
        "p99_slices": round(p99 / SLICE_MS, 2),
        "count": len(run.samples),
        "neighbour_s": round(median(sample.seconds for sample in neighbour.samples), 3),
    }


def percentiles(run: Run) -> tuple[float, float]:
    """The 50th and the 99th, in milliseconds."""
    p50, p99 = np.percentile([sample.seconds for sample in run.samples], (50, 99))
    return round(float(p50) * 1e3, 3), round(float(p99) * 1e3, 3)


def line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    cells = [row["version"], row["way"], row["neighbour"], f"{row['neighbour_s']:.2f}"]
    cells += [f"{row[name]:.2f}" for name in ("alone_p50_ms", "alone_p99_ms", "p50_ms")]
    return f"| {' | '.join(cells)} | **{row['p99_ms']:.1f}** | {row['p99_slices']:.1f} |"


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown, with where, when and how they were measured."""
    cells = ("version", "way", "neighbour sends", "s each", "alone p50 ms", "alone p99 ms")
    head = f"| {' | '.join((*cells, 'beside it p50 ms', 'p99 ms', 'p99 in slices'))} |"
    return "\n".join(
        [
            head,
            "|---" * 9 + "|",
            *map(line, results["rows"]),
            "",
            measured(results)[:-1] + "; 8 KiB decodes "
            f"over {SMALL_KV} tokens, slices of {results['slice_ms']:g} ms; at most "
            f"{results['most_slices']} slices are required.",
        ]
    )


if __name__ == "__main__":
    main()
