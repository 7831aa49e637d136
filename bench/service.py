"""What each way into the service costs: HTTP, the client package, frames, sessions, the Open
Inference Protocol.

`python -m bench.service` prints a table and writes bench/results/service-cpu.json. In every repeat
all ways take turns, each with its bare echo (of HTTP bodies, of frames), on one connection and on
several. What a way costs is its median beyond the backend's own time (plan + copy in + kernel +
copy out, as each answer tells). `--before DIR` lets another version (a git worktree) take its turns
in the same run. `--backend cuda` measures decode steps of a large model instead: bench/steps.py.
Bodies are fresh random numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client

from bench.cases.loads import Decode, Heads, fill
from bench.driver.connections import Run, Sample
from bench.driver.servers import Server, attnd, echo, road_echo
from bench.driver.ways import Target, Worker
from bench.provenance import RESULTS, provenance, write_results
from bench.service_table import reached, table
from bench.starting import start_figures

KV_LEN: Final = 64
BATCHES: Final = (1, 16, 64)
SIZES: Final = (8192, 65536, 262144, 1048576)
VARIANTS: Final = 16
"""Different bodies a case sends in turn."""
CONNECTIONS: Final = 8
CROWD_SHARE: Final = 0.5
"""Seconds of several connections, of those of one."""
PACKAGES: Final = ("attnd", "attnd-client", "uvicorn", "uvloop", "httptools", "torch", "numpy")

__all__ = ("main", "table")


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences decode a fp16 q of `size` bytes."""

    batch: int
    size: int

    @property
    def heads(self) -> Heads:
        """8 KV heads of 128, as large models have, or one of 64 where a row is too short."""
        row = self.size // self.batch // 2
        num_kv, dim = (8, 128) if row % 1024 == 0 else (1, 64)
        return Heads(row // dim, num_kv, dim)

    @property
    def pool(self) -> tuple[str, ...]:
        """Options of a service for it."""
        return self.heads.pool()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: repeats, requests and seconds of one loop."""

    repeats: int
    count: int
    limit_s: float


FULL: Final = Effort(5, 1000, 1.0)
QUICK: Final = Effort(2, 200, 0.4)


@dataclass(frozen=True, slots=True)
class Place:
    """A way under its name: where it leads, and the process that drives it."""

    worker: Worker
    target: Target


def main(argv: Sequence[str] | None = None) -> None:
    chosen = arguments(argv)
    effort = QUICK if chosen.quick else FULL
    if chosen.backend == "cuda":
        from bench.steps import measure_steps

        measure_steps(chosen.before, chosen.out, effort.repeats)
        return
    cases = [Case(batch, size) for batch in chosen.batches for size in chosen.sizes]
    told = provenance(PACKAGES)
    started = start_figures(chosen.before, 1 if chosen.quick else 3)
    rows = list(measure(cases, effort, chosen.before))
    results = told | {
        "kv_len": KV_LEN,
        "connections": CONNECTIONS,
        "effort": asdict(effort),
        "start": started,
        "rows": rows,
    }
    print(f"\n{table(results)}\n\n{reached(results)}")
    if chosen.out or not chosen.quick:
        write_results(chosen.out or RESULTS / "service-cpu.json", results)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="a rough look, written only with --out"
    )
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another version, beside it")
    parser.add_argument("--out", type=Path, help="where to write, in place of bench/results")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of q")
    return parser.parse_args(argv)


def measure(cases: Sequence[Case], effort: Effort, before: Path | None) -> Iterator[dict[str, Any]]:
    """A row for each case, in the order given; one service for each pool."""
    rows: dict[Case, dict[str, Any]] = {}
    with ExitStack() as shared:
        echoes = shared.enter_context(echo()), shared.enter_context(road_echo())
        worker = shared.enter_context(Worker())
        older = None if before is None else shared.enter_context(Worker(before))
        for options, group in groupby(sorted(cases, key=lambda case: case.pool), pool_of):
            with ExitStack() as stack:
                now = stack.enter_context(attnd(*options, grpc=True))
                old = None if before is None else stack.enter_context(attnd(*options, root=before))
                for case in group:
                    places = ways(worker, now, echoes) | older_ways(worker, older, old)
                    rows[case] = measure_case(case, now, old, places, effort)
                    print(line(rows[case]), flush=True)
    return (rows[case] for case in cases)


def pool_of(case: Case) -> tuple[str, ...]:
    return case.pool


def ways(worker: Worker, now: Server, echoes: tuple[Server, Server]) -> dict[str, Place]:
    """The ways into this version, and the echoes, in the order of their turns."""
    http, frames = echoes
    targets = {
        "http_echo": Target("http", http.port, path="?"),
        "http": Target("http", now.port),
        "client": Target("client", now.port),
        "road_echo": Target("road", socket=frames.socket),
        "road": Target("road", socket=now.socket),
        "session": Target("session", socket=now.socket),
        "session_in_place": Target("session_in_place", socket=now.socket),
        "oip_http": Target("oip_http", now.port),
        "oip_grpc": Target("oip_grpc", now.grpc_port),
    }
    return {name: Place(worker, target) for name, target in targets.items()}


def older_ways(worker: Worker, older: Worker | None, old: Server | None) -> dict[str, Place]:
    """The ways into the other version: HTTP, and its own client."""
    if older is None or old is None:
        return {}
    return {
        "before_http": Place(worker, Target("http", old.port)),
        "before_client": Place(older, Target("client", old.port)),
    }


def measure_case(
    case: Case, now: Server, old: Server | None, places: Mapping[str, Place], effort: Effort
) -> dict[str, Any]:
    """Fill sequences, then let all ways take turns."""
    with Client(f"http://127.0.0.1:{now.port}") as client, ExitStack() as stack:
        loads = {"": filled(case, client, stack)}
        if old is not None:
            older = stack.enter_context(Client(f"http://127.0.0.1:{old.port}"))
            loads["before"] = filled(case, older, stack)
        example = loads[""].requests()[0]
        for name, place in places.items():
            load = loads["before" if name.startswith("before") else ""]
            target = place.target
            if target.path:
                target = Target(target.kind, target.port, path=f"/{example.answer_bytes}")
            place.worker.open(name, target, load)
        runs: dict[str, list[Run]] = {name: [] for name in places}
        crowds: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(effort.repeats):
            for name, place in places.items():
                runs[name].append(place.worker.loop(name, effort.count, effort.limit_s))
                seconds = effort.limit_s * CROWD_SHARE
                crowds[name].append(place.worker.crowd(name, CONNECTIONS, seconds))
    return {
        "batch": case.batch,
        "q_bytes": case.size,
        "body_bytes": len(example.image()),
        "answer_bytes": example.answer_bytes,
        **asdict(case.heads),
        "ways": {name: figures(runs[name], crowds[name]) for name in places},
        "added_us": added(runs),
    }


def filled(case: Case, client: Client, stack: ExitStack) -> Decode:
    """A case's sequences, which are deleted when `stack` is left, and the decodes of them."""
    names = fill(client, case.batch, case.heads, KV_LEN)
    for name in names:
        stack.callback(client.delete_sequence, name)
    return Decode(names, case.heads, KV_LEN, VARIANTS)


def figures(runs: Sequence[Run], crowds: Sequence[float]) -> dict[str, float]:
    """Medians over the repeats, in milliseconds and requests a second; the 99th percentile is of
    all the repeats' samples. `cost_p50_ms` is what is beyond the backend's own time."""
    every = [sample.seconds for run in runs for sample in run.samples]
    return {
        "p50_ms": round(median(middles(runs, of_call)) * 1e3, 4),
        "p99_ms": round(float(np.percentile(every, 99)) * 1e3, 4),
        "cost_p50_ms": round(median(middles(runs, of_cost)) * 1e3, 4),
        "backend_p50_ms": round(median(middles(runs, of_backend)) * 1e3, 4),
        "per_s": round(median(run.per_second for run in runs), 1),
        "crowd_per_s": round(median(crowds), 1),
    }


def of_call(sample: Sample) -> float:
    return sample.seconds


def of_backend(sample: Sample) -> float:
    return sample.backend_s


def of_cost(sample: Sample) -> float:
    return sample.seconds - sample.backend_s


def middles(runs: Sequence[Run], of: Callable[[Sample], float]) -> list[float]:
    """Each run's median, in seconds."""
    return [median(map(of, run.samples)) for run in runs]


BESIDE: Final = {
    "http": "http_echo",
    "client": "http",
    "road": "road_echo",
    "session": "road",
    "session_in_place": "road",
    "oip_http": "http",
    "oip_grpc": "http",
    "before_http": "http_echo",
    "before_client": "before_http",
}
"""What each way is held against: its echo, or the same call by plain sockets."""


def added(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Microseconds of each way beyond what it is held against, the backend's time left out: the
    median of the repeats' differences."""
    found = {}
    for name, other in BESIDE.items():
        if name in runs:
            pairs = zip(middles(runs[name], of_cost), middles(runs[other], of_cost), strict=True)
            found[name] = round(median(one - two for one, two in pairs) * 1e6, 1)
    return found


def line(row: Mapping[str, Any]) -> str:
    """One case as it is done."""
    costs = "  ".join(f"{name} {way['cost_p50_ms']:.3f}" for name, way in row["ways"].items())
    crowds = "  ".join(f"{name} {way['crowd_per_s']:,.0f}" for name, way in row["ways"].items())
    backend = row["ways"]["road"]["backend_p50_ms"]
    head = f"B {row['batch']}, {row['q_bytes'] // 1024} KiB: backend {backend:.3f} ms"
    return f"{head}; beyond it, ms: {costs}\n    {CONNECTIONS} connections, per s: {crowds}"


if __name__ == "__main__":
    main()
