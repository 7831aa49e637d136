"""Cost of every way into the service: HTTP, frames, Client, Session, Open Inference Protocol.

    python -m bench.service [--quick] [--before DIR] [--batches N ...] [--sizes BYTES ...]
    python -m bench.service --backend cuda [--before DIR]     # decode steps: bench/gpu_steps.py

One case is `batch` sequences that decode a q of `size` bytes. In every repeat all ways take turns,
beside a bare HTTP echo, on one connection and on several. The cost of a way is its
median beyond the backend's own time (plan, copy in, kernel, copy out), which each answer reports.
`--before DIR` runs the service and client of another checkout in the same turns.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client

from bench.cases.loads import Decode, Heads, fill
from bench.driver.calls import Run, Sample
from bench.driver.processes import start_figures
from bench.driver.servers import Server, attnd, echo
from bench.driver.ways import Kind, Target
from bench.driver.worker import Worker
from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import markdown, with_stamp

KV_LEN: Final = 64
BATCHES: Final = (1, 16, 64)
SIZES: Final = (8192, 65536, 262144, 1048576)
VARIANTS: Final = 16
"""Different requests of a case, sent in turn."""
CONNECTIONS: Final = 8
PACKAGES: Final = ("attnd", "attnd-client", "uvicorn", "uvloop", "httptools", "torch", "numpy")
KINDS: Final[tuple[Kind, ...]] = (
    *("http", "client", "road", "session", "session_in_place"),
    *("oip_http", "oip_grpc"),
)
PACKAGE_KINDS: Final = ("client", "session", "session_in_place")
"""Ways by the client package, whose version is that of the service."""
COSTS: Final = {
    "session_in_place": "Session, in place",
    "session": "Session",
    "road": "frames",
    "client": "Client",
    "http": "raw HTTP",
    "http_echo": "bare ASGI echo",
    "oip_http": "OIP over HTTP",
    "oip_grpc": "OIP over gRPC",
}
"""Names of ways in the tables."""
RATES: Final = ("session", "client", "http")


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`batch` sequences decode a fp16 q of `size` bytes."""

    batch: int
    size: int

    @property
    def heads(self) -> Heads:
        """8 KV heads of 128, as large models have, or one of 64 for a short row."""
        row = self.size // self.batch // 2
        num_kv, dim = (8, 128) if row % 1024 == 0 else (1, 64)
        return Heads(row // dim, num_kv, dim)

    def pool(self) -> tuple[str, ...]:
        return self.heads.pool()


@dataclass(frozen=True, slots=True)
class Effort:
    """Repeats, and the largest number of requests and seconds of one loop."""

    repeats: int
    count: int
    limit_s: float


FULL: Final = Effort(5, 1000, 1.0)
QUICK: Final = Effort(2, 200, 0.4)


@dataclass(frozen=True, slots=True)
class Turn:
    """A way with its load, and the process that drives it."""

    worker: Worker
    target: Target
    load: Decode


def measure(
    cases: Sequence[DecodeCase], effort: Effort, before: Path | None
) -> list[dict[str, Any]]:
    """A row for each case, in the given order; cases with the same pool share a service."""
    rows: dict[DecodeCase, dict[str, Any]] = {}
    with ExitStack() as shared:
        bare = shared.enter_context(echo())
        worker = shared.enter_context(Worker())
        older = None if before is None else shared.enter_context(Worker(before))
        for pool, group in groupby(sorted(cases, key=DecodeCase.pool), DecodeCase.pool):
            with ExitStack() as stack:
                sides = {"": (stack.enter_context(attnd(*pool, oip=True)), worker)}
                if before is not None and older is not None:
                    old = stack.enter_context(attnd(*pool, root=before, oip=True))
                    sides["before_"] = (old, older)
                for case in group:
                    with ExitStack() as filled:
                        turns: dict[str, Turn] = {}
                        for prefix, (server, package) in sides.items():
                            load = filled_load(case, server, filled)
                            turns |= turns_of(prefix, server, worker, package, load)
                        size = load.requests()[0].answer_bytes
                        bare_target = Target("http", bare.port, path=f"/{size}")
                        turns["http_echo"] = Turn(worker, bare_target, load)
                        # beside the same way of the other version, so both have the same noise
                        beside = sorted(turns, key=lambda name: name.removeprefix("before_"))
                        rows[case] = measure_case(case, {n: turns[n] for n in beside}, effort)
                    print(line(rows[case]), flush=True)
    return [rows[case] for case in cases]


def filled_load(case: DecodeCase, server: Server, stack: ExitStack) -> Decode:
    """A case's sequences, which are deleted as `stack` is left, and the decodes of them."""
    client = stack.enter_context(Client(server.url))
    names = fill(client, case.batch, case.heads, KV_LEN)
    for name in names:
        stack.callback(client.delete_sequence, name)
    return Decode(names, case.heads, KV_LEN, VARIANTS)


def turns_of(
    prefix: str, server: Server, worker: Worker, package: Worker, load: Decode
) -> dict[str, Turn]:
    """All ways into one version; `package` has that version's client package."""
    turns = {}
    for kind in KINDS:
        ports = {"oip_grpc": server.grpc_port, "oip_http": server.oip_port}
        port = ports.get(kind, server.port)
        driver = package if kind in PACKAGE_KINDS else worker
        turns[prefix + kind] = Turn(driver, Target(kind, port, server.socket), load)
    return turns


def measure_case(case: DecodeCase, turns: Mapping[str, Turn], effort: Effort) -> dict[str, Any]:
    """All ways in turn, `effort.repeats` times."""
    for name, turn in turns.items():
        turn.worker.open(name, turn.target, turn.load)
    runs: dict[str, list[Run]] = {name: [] for name in turns}
    crowds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(effort.repeats):
        for name, turn in turns.items():
            runs[name].append(turn.worker.loop(name, effort.count, effort.limit_s))
            crowds[name].append(turn.worker.crowd(name, CONNECTIONS, effort.limit_s / 2))
    example = turns["http"].load.requests()[0]
    return {
        "batch": case.batch,
        "q_bytes": case.size,
        "body_bytes": len(example.image()),
        "answer_bytes": example.answer_bytes,
        **asdict(case.heads),
        "ways": {name: figures(runs[name], crowds[name]) for name in turns},
        "beside_before": {
            name: round(median(map(truediv, medians(runs[name]), medians(old))), 3)
            for name in KINDS
            if (old := runs.get(f"before_{name}"))
        },
    }


def medians(runs: Sequence[Run]) -> list[float]:
    """The median seconds of a call, of each repeat."""
    return [median(sample.seconds for sample in run.samples) for run in runs]


def figures(runs: Sequence[Run], crowds: Sequence[float]) -> dict[str, float]:
    """Medians over the repeats in milliseconds and requests a second; p99 of all samples."""
    every = [sample.seconds for run in runs for sample in run.samples]

    def middle_ms(value: Callable[[Sample], float]) -> float:
        return round(median(median(map(value, run.samples)) for run in runs) * 1e3, 4)

    return {
        "p50_ms": middle_ms(lambda sample: sample.seconds),
        "p99_ms": round(float(np.percentile(every, 99)) * 1e3, 4),
        "cost_p50_ms": middle_ms(lambda sample: sample.cost_s),
        "backend_p50_ms": middle_ms(lambda sample: sample.backend_s),
        "per_s": round(median(run.per_second for run in runs), 1),
        "crowd_per_s": round(median(crowds), 1),
    }


def line(row: Mapping[str, Any]) -> str:
    """A measured case, for the terminal."""
    ways = row["ways"]
    costs = "  ".join(f"{name} {way['cost_p50_ms']:.3f}" for name, way in ways.items())
    head = f"B {row['batch']}, {row['q_bytes'] // 1024} KiB"
    return f"{head}: backend {ways['road']['backend_p50_ms']:.3f} ms; beyond it: {costs}"


def table(results: Results) -> str:
    """Costs of the ways, then percentiles and rates, then the ratio to the version before."""
    rows, start = results["rows"], results["start"]
    parts = [costs_table(rows), rates_table(rows)]
    if any("before_http" in row["ways"] for row in rows):
        parts.append(before_table(rows))
    processes = ", ".join(f"{one['name']} {one['pss']:.0f}" for one in start["processes"])
    note = (
        f"kv_len {results['kv_len']}, fp16, one layer; medians beyond the backend's own time; "
        f"p99 in ms, req/s of {results['connections']} connections. Start to ready "
        f"{start['ready_s']:.1f} s ({start['imports_s']:.1f} s of it the engine's imports), idle "
        f"{start['pss_mib']:.0f} MiB with the default pool ({processes})"
    )
    return with_stamp("\n\n".join(parts), results, note)


def costs_table(rows: Sequence[Mapping[str, Any]]) -> str:
    ways = [name for name in COSTS if name in rows[0]["ways"]]

    def cells(row: Mapping[str, Any]) -> list[str]:
        figures = row["ways"]
        times = [figures["road"]["backend_p50_ms"], *(figures[n]["cost_p50_ms"] for n in ways)]
        return [*case_cells(row), *(f"{ms:.3f}" for ms in times)]

    return markdown(
        ("B", "q", "backend ms", *(f"{COSTS[name]} ms" for name in ways)), map(cells, rows), keys=2
    )


def rates_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [COSTS[name] for name in RATES]
    head = ["B", "q", *(f"{name} p99" for name in names), *(f"{name} req/s" for name in names)]
    cells = []
    for row in rows:
        ways = [row["ways"][name] for name in RATES]
        p99 = (f"{way['p99_ms']:.1f}" for way in ways)
        cells.append([*case_cells(row), *p99, *(f"{way['crowd_per_s']:,.0f}" for way in ways)])
    return markdown(head, cells, keys=2)


def before_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median times and requests a second, as multiples of the older version's.

    Times are compared repeat by repeat, as far as the results have it.
    """
    measured = [row for row in rows if "before_http" in row["ways"]]
    ways = [name for name in COSTS if f"before_{name}" in measured[0]["ways"]]

    def cells(row: Mapping[str, Any]) -> Iterator[str]:
        for name in ways:
            now, old = row["ways"][name], row["ways"][f"before_{name}"]
            p50 = row.get("beside_before", {}).get(name, now["p50_ms"] / old["p50_ms"])
            rate = now["crowd_per_s"] / old["crowd_per_s"]
            yield f"{p50:.2f} x, {old['crowd_per_s']:,.0f} req/s ({rate:.2f} x)"

    head = (f"{COSTS[name]}: p50, before's req/s" for name in ways)
    return markdown(
        ("B", "q, now beside before", *head), ((*case_cells(row), *cells(row)) for row in measured)
    )


def case_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["batch"]), f"{row['q_bytes'] // 1024} KiB"


def positive(text: str) -> int:
    """Read an option that is a number of 1 or more. Raises ValueError, ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number}: must be 1 or more")
    return number


def main() -> None:
    parser = command_line(__doc__ or "", before=True)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--places", default="time_sliced,mps,other_gpu", help="with cuda: places of the caller"
    )
    parser.add_argument("--batches", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="bytes of q")
    chosen = parser.parse_args()
    if chosen.backend == "cuda":
        from bench.gpu_steps import measure_steps

        measure_steps(chosen)
        return
    cases = [DecodeCase(batch, size) for batch in chosen.batches for size in chosen.sizes]
    effort = QUICK if chosen.quick else FULL
    results = provenance(PACKAGES) | {
        "kv_len": KV_LEN,
        "connections": CONNECTIONS,
        "start": start_figures(1 if chosen.quick else 3),
        "rows": measure(cases, effort, chosen.before),
    }
    publish(results, table(results), RESULTS / "service-cpu.json", chosen)


if __name__ == "__main__":
    main()
