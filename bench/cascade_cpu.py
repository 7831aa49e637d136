"""Cascade and flat decode on the CPU backend, of sequences that share a long prefix.

    python -m bench.cascade_cpu [--threads N] [--quick] [--out FILE]

The same KV in the same shuffled pages is attended twice: flat (each sequence reads its whole KV)
and as a cascade (the shared pages are read once). The machine's ceilings, a float32 matrix product
and a read of memory, are measured first in the same process.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from bench.cases.kernel_plans import flat_plan, level_of, row_levels
from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import table as markdown
from bench.report.tables import with_stamp
from kernels import make_backend
from kernels.backend import Attend, DType, Plan, PoolGeometry, Scoring

CASCADE_RESULTS: Final = RESULTS / "cascade-cpu.json"
DTYPES: Final[tuple[DType, ...]] = ("fp32", "fp16")
PAGE_SIZE: Final = 16
REPEATS: Final = 9


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """`sequences` decode one token each: `shared` common tokens, then `own` of their own."""

    sequences: int
    shared: int
    own: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} x {self.head_dim}"
        return f"{self.sequences} x ({self.shared} shared + {self.own}), {heads}"


CASES: Final = (
    PrefixCase(32, 4096, 64),
    PrefixCase(32, 4096, 64, num_kv_heads=32),
    PrefixCase(8, 1024, 64),
)


def plans(case: PrefixCase) -> tuple[Plan, Plan, int]:
    """A flat and a cascade plan over the same shuffled pages, and the number of pages."""
    shared = {"nodes": 1, "tokens_per_node": case.shared}
    own = {"nodes": case.sequences, "tokens_per_node": case.own}
    row = {
        "kind": "cascade",
        "page_size": PAGE_SIZE,
        "batch": case.sequences,
        "levels": [shared, own],
    }
    levels, positions, num_pages = row_levels(row)
    cascade = Plan(tuple(level_of(nodes, PAGE_SIZE) for nodes in levels), positions)
    return flat_plan(levels, positions, PAGE_SIZE), cascade, num_pages


def median_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def measure(case: PrefixCase, dtype: DType) -> dict[str, Any]:
    """Median milliseconds of both, and the largest difference of their results."""
    rng = np.random.default_rng(0)
    flat, cascade, num_pages = plans(case)
    geometry = PoolGeometry(1, num_pages, PAGE_SIZE, case.num_kv_heads, case.head_dim, "NHD", dtype)
    backend = make_backend("cpu", geometry)
    shape = (num_pages * PAGE_SIZE, case.num_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    backend.append(0, k, v, np.arange(shape[0], dtype=np.int32))
    q = rng.standard_normal((case.sequences, case.num_qo_heads, case.head_dim), np.float32)

    def attend(plan: Plan) -> Any:
        request = Attend(0, q, plan, Scoring(case.head_dim**-0.5))
        return backend.attend([request]).result()[0].o

    difference = float(np.abs(attend(flat) - attend(cascade)).max())
    flat_ms, cascade_ms = median_ms(lambda: attend(flat)), median_ms(lambda: attend(cascade))
    flat_bytes = case.sequences * (case.shared + case.own) * geometry.token_bytes
    backend.close()
    return {
        "case": str(case),
        **asdict(case),
        "dtype": dtype,
        "flat_ms": round(flat_ms, 2),
        "cascade_ms": round(cascade_ms, 2),
        "speedup": round(flat_ms / cascade_ms, 2),
        "flat_gb_per_s": round(flat_bytes / flat_ms / 1e6, 2),
        "max_difference": difference,
    }


def ceilings() -> dict[str, float]:
    """GFLOP/s of a 1024-cubed float32 product; GB/s of summing 256 MiB."""
    a, big = torch.randn(1024, 1024), torch.ones(64 * 1024 * 1024)
    product, read = median_ms(lambda: a @ a), median_ms(lambda: big.sum())
    return {
        "matmul_gflops": round(2 * 1024**3 / product / 1e6, 1),
        "read_gb_per_s": round(big.numel() * 4 / read / 1e6, 1),
    }


def table(results: Results) -> str:
    """Milliseconds of flat and cascade decode."""
    rows = [
        (
            row["case"],
            row["dtype"],
            f"{row['flat_ms']:.1f}",
            f"{row['cascade_ms']:.1f}",
            f"**{row['speedup']:.1f} x**",
        )
        for row in results["rows"]
    ]
    head = ("sequences", "dtype", "flat ms", "cascade ms", "faster")
    return with_stamp(markdown(head, rows), results)


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    results: Results = provenance(["torch"]) | {
        "device": f"{platform.processor() or platform.machine()}, {chosen.threads} threads",
        "ceilings": ceilings(),
        "rows": [],
    }
    for case in CASES[-1:] if chosen.quick else CASES:
        for dtype in DTYPES:
            row = measure(case, dtype)
            results["rows"].append(row)
            times = f"flat {row['flat_ms']:9.2f} ms  cascade {row['cascade_ms']:8.2f} ms"
            print(f"{row['case']:44} {dtype:9} {times}  {row['speedup']:6.2f}x", flush=True)
    publish(results, table(results), CASCADE_RESULTS, chosen)


if __name__ == "__main__":
    main()
