"""Decode over HTTP against a bare ASGI echo of the same bytes, and the start of the service.

`python -m bench.service` prints a table and writes bench/results/service-cpu.json. In each repeat
the echo and the service take turns, on one connection (latency) and on several (requests a second).
"added" is what the service takes at the median beyond the echo and beyond the backend's own time
(plan + copy-in + kernel + copy-out of Server-Timing). Bodies are fresh random numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client, NewSequence
from safetensors.numpy import save

from bench.load import Connection, Run, Sample, crowd, loop
from bench.machine import RESULTS, provenance, write_results
from bench.servers import ROOT, Server, attnd, echo

KV_LEN: Final = 64
BATCHES: Final = (1, 16, 64)
SIZES: Final = (8192, 65536, 262144, 1048576)
VARIANTS: Final = 16
"""Different bodies a case sends in turn."""
CONNECTIONS: Final = 8
PACKAGES: Final = ("attnd", "uvicorn", "uvloop", "httptools", "torch", "numpy", "fastapi")


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV heads and head_dim of the pool."""

    num_kv_heads: int
    head_dim: int

    @property
    def options(self) -> tuple[str, ...]:
        """Command line of a service of this geometry."""
        heads = ("--pool.num-kv-heads", str(self.num_kv_heads))
        return (*heads, "--pool.head-dim", str(self.head_dim), "--pool.num-layers", "1")


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences decode a fp16 q of `size` bytes."""

    batch: int
    size: int

    @property
    def geometry(self) -> Geometry:
        """8 KV heads of 128, as large models have, or one of 64 where a row is too short."""
        row = self.size // self.batch // 2
        return Geometry(8, 128) if row % 1024 == 0 else Geometry(1, 64)

    @property
    def num_qo_heads(self) -> int:
        return self.size // self.batch // 2 // self.geometry.head_dim


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: repeats, requests and seconds of one loop."""

    repeats: int
    count: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One case's figures, in milliseconds and requests a second; `per_s` on one connection."""

    batch: int
    body_bytes: int
    answer_bytes: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    p50_ms: float
    p99_ms: float
    per_s: float
    crowd_per_s: float
    echo_p50_ms: float
    echo_p99_ms: float
    echo_per_s: float
    echo_crowd_per_s: float
    backend_p50_ms: float
    added_p50_ms: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a rough look, a few seconds a row")
    parser.add_argument("--out", type=Path, default=RESULTS / "service-cpu.json")
    chosen = parser.parse_args(argv)
    effort = Effort(2, 200, 0.5) if chosen.quick else Effort(7, 1500, 2.0)
    started = start_figures()
    cases = [Case(batch, size) for batch in BATCHES for size in SIZES]
    rows = list(measure(cases, effort))
    results = provenance(PACKAGES) | {
        "kv_len": KV_LEN,
        "connections": CONNECTIONS,
        "effort": asdict(effort),
        "start": started,
        "rows": [asdict(row) for row in rows],
    }
    print(table(results))
    write_results(chosen.out, results)


def start_figures() -> dict[str, float]:
    """Seconds from start to ready with the default pool, those of the imports alone, MiB idle."""
    imports = "import service.__main__, kernels.cpu"
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
        times.append(time.perf_counter() - began)
    with attnd() as server:
        return {
            "imports_s": round(median(times), 3),
            "ready_s": round(server.ready_s, 3),
            "resident_mib": round(server.resident_mib, 1),
        }


def measure(cases: Sequence[Case], effort: Effort) -> Iterator[Row]:
    """A row for each case, in the order given; one service for each geometry."""
    rows: dict[Case, Row] = {}
    by_geometry = sorted(cases, key=lambda case: case.geometry.num_kv_heads)
    with echo() as bare:
        for geometry, group in groupby(by_geometry, key=lambda case: case.geometry):
            with attnd(*geometry.options) as service:
                for case in group:
                    rows[case] = measure_case(case, service, bare, effort)
                    print(line(asdict(rows[case])), flush=True)
    return (rows[case] for case in cases)


def measure_case(case: Case, service: Server, bare: Server, effort: Effort) -> Row:
    """Fill sequences, then let echo and service take turns."""
    with Client(f"http://127.0.0.1:{service.port}") as client:
        names = fill(client, case)
        bodies = [decode_body(case, names) for _ in range(VARIANTS)]
        answer = answer_bytes(service, bodies[0])
        ours = [framed("/v1/decode", body) for body in bodies]
        theirs = [framed(f"/{answer}", body) for body in bodies]
        sides = ((bare, theirs), (service, ours))
        for server, requests in sides:
            loop(server.port, requests, answer, 100, effort.limit_s)
        runs: list[list[Run]] = [[], []]
        crowds: list[list[float]] = [[], []]
        for _ in range(effort.repeats):
            for side, (server, requests) in enumerate(sides):
                runs[side].append(loop(server.port, requests, answer, effort.count, effort.limit_s))
                crowds[side].append(
                    crowd(server.port, requests, answer, effort.limit_s / 4, CONNECTIONS)
                )
        for name in names:
            client.delete_sequence(name)
    return summary(case, len(bodies[0]), answer, runs, [median(found) for found in crowds])


def summary(
    case: Case, body: int, answer: int, runs: Sequence[Sequence[Run]], crowds: Sequence[float]
) -> Row:
    """Medians over the repeats; the 99th percentile is of all the repeats' samples."""
    bare, ours = runs
    echo_p50 = middle(bare, lambda sample: sample.seconds)
    beside = middle(ours, lambda sample: sample.seconds - sample.backend_s)
    return Row(
        batch=case.batch,
        body_bytes=body,
        answer_bytes=answer,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.geometry.num_kv_heads,
        head_dim=case.geometry.head_dim,
        p50_ms=middle(ours, lambda sample: sample.seconds),
        p99_ms=p99(ours),
        per_s=round(median(run.per_second for run in ours), 1),
        crowd_per_s=round(crowds[1], 1),
        echo_p50_ms=echo_p50,
        echo_p99_ms=p99(bare),
        echo_per_s=round(median(run.per_second for run in bare), 1),
        echo_crowd_per_s=round(crowds[0], 1),
        backend_p50_ms=middle(ours, lambda sample: sample.backend_s),
        added_p50_ms=round(beside - echo_p50, 4),
    )


def middle(runs: Sequence[Run], of: Callable[[Sample], float]) -> float:
    """The median over runs of each run's median, in milliseconds."""
    return round(median(median(map(of, run.samples)) for run in runs) * 1000, 4)


def p99(runs: Sequence[Run]) -> float:
    """The 99th percentile of every sample, in milliseconds."""
    every = [sample.seconds for run in runs for sample in run.samples]
    return round(float(np.percentile(every, 99)) * 1000, 4)


def fill(client: Client, case: Case) -> list[str]:
    """`case.batch` sequences of KV_LEN tokens of random KV; their ids."""
    made = client.create_sequences([NewSequence() for _ in range(case.batch)])
    names = [sequence.id for sequence in made]
    shape = (KV_LEN * case.batch, case.geometry.num_kv_heads, case.geometry.head_dim)
    random = np.random.default_rng()
    k, v = (random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in "kv")
    indptr = [KV_LEN * row for row in range(case.batch + 1)]
    client.append(0, names, k, v, append_indptr=indptr)
    return names


def decode_body(case: Case, names: Sequence[str]) -> bytes:
    """A decode of all the sequences, with a q of fresh random numbers."""
    shape = (case.batch, case.num_qo_heads, case.geometry.head_dim)
    q = np.random.default_rng().standard_normal(shape, dtype=np.float32).astype(np.float16)
    return save({"q": q}, {"request": json.dumps({"layer": 0, "sequences": list(names)})})


def framed(path: str, body: bytes) -> bytes:
    """An HTTP/1.1 request."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/vnd.safetensors\r\n\r\n".encode() + body


def answer_bytes(server: Server, body: bytes) -> int:
    """How long the service's answer is."""
    connection = Connection(server.port, 2 * len(body))
    try:
        return len(connection.answer(framed("/v1/decode", body)))
    finally:
        connection.close()


HEAD: Final = (
    "| B | body | p50 ms | p99 ms | req/s | req/s, 8 conn. | echo p50 ms | echo req/s |"
    " backend p50 ms | added p50 ms |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, float]) -> str:
    """One row of the table."""
    return (
        f"| {row['batch']} | {row['body_bytes'] / 1024:.1f} KiB | {row['p50_ms']:.3f}"
        f" | {row['p99_ms']:.3f} | {row['per_s']:,.0f} | {row['crowd_per_s']:,.0f}"
        f" | {row['echo_p50_ms']:.3f} | {row['echo_per_s']:,.0f}"
        f" | {row['backend_p50_ms']:.3f} | **{row['added_p50_ms']:.3f}** |"
    )


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, with where, when and how they were measured."""
    start = results["start"]
    return "\n".join(
        [
            HEAD,
            *map(line, results["rows"]),
            "",
            f"{results['machine']}; {results['date'][:10]}; `{results['command']}`; "
            f"kv_len {results['kv_len']}, fp16, one layer. Start to ready {start['ready_s']:.1f} s "
            f"({start['imports_s']:.1f} s of it imports), {start['resident_mib']:.0f} MiB resident "
            "with the default pool.",
        ]
    )


if __name__ == "__main__":
    main()
