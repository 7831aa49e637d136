"""Time of the CUDA kernels on the rows of workloads.json, beside the ceilings of the same GPU.

    python -m bench.kernels [--only TEXT] [--mma-sync] [--invariant] [--sinks] [--profile]
    python -m bench.kernels --random N [--seed S] [--invariant]

A row's floor is max(bytes / read ceiling, flops / matmul ceiling), with both ceilings measured in
this run; roofline = floor / time. Times are medians of 7 replays of a CUDA graph of 6 or more calls
over working sets larger than the cache. `--invariant` and `--sinks` replay the row's graph and the
other one in turn, and show the median of the pairs' ratios; a row that invariant numerics make more
than 1 % faster ends the run with status 1. `--only TEXT` measures the rows with
TEXT in their names, `--only cpu/` the host's times. `--random` draws N workloads instead, and shows
the ten of the least roofline among those above 50 us.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Final

import cupy
import numpy as np

from bench.cases.kernel_calls import KernelCall, build
from bench.cases.kernel_plans import Row, level_of, row_levels
from bench.cases.random_rows import random_rows
from bench.report.provenance import provenance, workloads, write_results
from kernels.backend import Attend, Plan, PoolGeometry, Scoring
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device.launch import device_arch
from kernels.cuda.wide import variants as wide

REPLAYS: Final = 7
PAIRS: Final = 10
"""Replays of two graphs in turn; of a pair the one that came second comes first in the next."""
PROFILED_MS: Final = 20
"""Of each measurement with `--profile`: so long that the profiler's own launches do not count."""
MOST_SPEED: Final = 1.01
"""With invariant numerics, as a multiple of the speed without."""
LONG_MS: Final = 0.05
REST_S: Final = 0.2
"""Before each measurement: without, power limits the device, and the first of two looks best."""
HOST_CALLS: Final = 40
"""Plans, each with one cold and one cached call; two more come first, untimed."""

READ_SOURCE: Final = r"""
extern "C" __global__ void __launch_bounds__(512)
read_all(const uint4* x, long long n, uint4* out) {
  uint4 sum = make_uint4(0, 0, 0, 0);
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 y[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = __ldg(x + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum.x ^= y[k].x, sum.y ^= y[k].y, sum.z ^= y[k].z, sum.w ^= y[k].w;
  }
  if (sum.x == 0x12345678u && sum.y == 0x9abcdef0u) *out = sum;
}
"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A CUDA graph of `calls` calls, to be timed on `stream`."""

    graph: Any
    stream: Any
    calls: int

    @classmethod
    def of(cls, call: Callable[[int], None], calls: int) -> Replay:
        """Captured and launched once."""
        stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        with stream:
            call(0)
            stream.synchronize()
            stream.begin_capture()
            for i in range(calls):
                call(i)
            graph = stream.end_capture()
            graph.launch(stream)
        return cls(graph, stream, calls)

    def ms(self) -> float:
        """Milliseconds per call of one launch."""
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(self.stream)
        self.graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        took: float = cupy.cuda.get_elapsed_time(begin, end)
        return took / self.calls

    def profile(self, ms: float) -> None:
        """About `PROFILED_MS` of launches, of `ms` per call, for a profiler."""
        cupy.cuda.runtime.profilerStart()
        for _ in range(ceil(PROFILED_MS / (self.calls * ms))):
            self.graph.launch(self.stream)
        self.stream.synchronize()
        cupy.cuda.runtime.profilerStop()


def graph_ms(call: Callable[[int], None], calls: int, profile: bool = False) -> float:
    """Milliseconds per call: median of graph replays, after a warm-up; `profile`: then more of
    them for a profiler."""
    replay = Replay.of(call, calls)
    ms = median(replay.ms() for _ in range(REPLAYS))
    if profile:
        replay.profile(ms)
    return ms


def beside(plain: KernelCall, call: Callable[[int], None], calls: int) -> tuple[float, float]:
    """Milliseconds per call, and how many times that of `plain`'s: the medians of pairs in turn."""
    time.sleep(REST_S)
    replays = Replay.of(plain.call, plain.calls), Replay.of(call, calls)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(PAIRS):
        for which in (turn % 2, 1 - turn % 2):
            times[which].append(replays[which].ms())
    return median(times[1]), median(b / a for a, b in zip(*times, strict=True))


def properties() -> dict[str, Any]:
    """The device's properties, as the CUDA runtime reports them."""
    found: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(0)
    return found


def read_ceiling() -> float:
    """TB/s of reading 4 GiB with 16-byte loads, the best of a few grid sizes."""
    size = 1 << 32
    data = cupy.random.randint(0, 256, size // 64, dtype=cupy.uint8)
    data = cupy.tile(data, 64)
    out = cupy.zeros(4, cupy.uint32)
    kernel = cupy.RawKernel(READ_SOURCE, "read_all")
    best = 0.0
    for blocks in (2, 4, 8, 16):
        grid = properties()["multiProcessorCount"] * blocks
        arguments = (data, np.int64(size // 16), out)
        ms = graph_ms(lambda i, g=grid, a=arguments: kernel((g,), (512,), a), 4)  # type: ignore[misc]
        best = max(best, size / ms / 1e9)
    return best


def matmul_ceiling() -> float:
    """TFLOP/s of an fp16 product of 8192 x 8192 matrices (cuBLAS), float32 accumulation."""
    n = 8192
    rng = np.random.default_rng(0)
    half = [cupy.asarray(rng.standard_normal((n, n), np.float32).astype(np.float16)) for _ in "ab"]
    out = cupy.empty((n, n), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        times = []
        for _ in range(12):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            cupy.matmul(half[0], half[1], out=out)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    return 2 * n**3 / float(median(times[4:])) / 1e9


def run_facts() -> dict[str, Any]:
    """The stamp of this run in a results file, with the device and its ceilings."""
    return provenance(["cupy-cuda13x", "numpy", "cuda-bindings"]) | {
        "device": properties()["name"].decode(),
        "arch": device_arch(0),
        "multiprocessors": int(properties()["multiProcessorCount"]),
        "ceilings": {
            "read_tbps": round(read_ceiling(), 3),
            "matmul_tflops": round(matmul_ceiling(), 1),
        },
    }


def measure(row: Row, ceilings: dict[str, float], chosen: argparse.Namespace) -> Row:
    """One row of the results, with what the command line asks for beside it."""
    free_memory()
    case = build(row)
    ms = timed(case, chosen.profile)
    floor = max(
        row["bytes"] / ceilings["read_tbps"] / 1e9, row["flops"] / ceilings["matmul_tflops"] / 1e9
    )
    result = {
        "name": row["name"],
        "ms": round(ms, 5),
        "tbps": round(row["bytes"] / ms / 1e9, 3),
        "tflops": round(row["flops"] / ms / 1e9, 1),
        "floor_ms": round(floor, 5),
        "roofline": round(floor / ms, 3),
    }
    if row["kind"] == "cascade":
        result["flat_ms"] = round(timed(build(row, flat=True), chosen.profile), 5)
    if chosen.invariant and row["kind"] not in ("append", "merge"):
        other = build(row, numerics="invariant")
        took, times = beside(case, other.call, other.calls)
        result |= {"invariant_ms": round(took, 5), "invariant_speed": round(1 / times, 3)}
        if chosen.profile:
            timed(other, True)
    if chosen.sinks and case.with_sinks is not None:
        took, times = beside(case, case.with_sinks, case.calls)
        result |= {"sinks_ms": round(took, 5), "sinks_time": round(times, 3)}
    return result


def timed(case: KernelCall, profile: bool) -> float:
    time.sleep(REST_S)
    return graph_ms(case.call, case.calls, profile)


def free_memory() -> None:
    """Of rows before."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def cpu_cost(kv_lens: list[int]) -> dict[str, list[float]]:
    """Microseconds of host time of `HOST_CALLS` attention calls of a decode.

    `cold_us` and `cached_us` are whole calls, mostly the copy of q. `cold_plan_us` is the plan of a
    new batch, and `cached_launch_us` a layer with q on the device: find the plan and launch.
    """
    batch = len(kv_lens)
    row = {"kind": "decode", "kv_lens": kv_lens, "page_size": 16}
    levels, positions, pages = row_levels(row)
    backend = CudaBackend(PoolGeometry(2, pages, 16, 8, 128))
    plans = [
        Plan(tuple(level_of(nodes, 16) for nodes in levels), positions.copy())
        for _ in range(HOST_CALLS + 2)
    ]
    q = np.random.default_rng(0).standard_normal((batch, 32, 128), np.float32).astype(np.float16)
    scoring = Scoring(128**-0.5)
    names = ("cold_us", "cold_plan_us", "cached_us", "cached_launch_us")
    times: dict[str, list[float]] = {name: [] for name in names}
    for plan in plans:
        for name in ("cold_us", "cached_us"):
            start = time.perf_counter()
            pending = backend.attend([Attend(0, q, plan, scoring)])
            times[name].append(time.perf_counter() - start)
            if name == "cold_us":
                times["cold_plan_us"].append(pending.seconds.plan)
            pending.result()
    config = AttentionConfig(backend.kv, 32, "fp16", scoring, False)
    on_device = cupy.zeros(q.size * 3, cupy.float16).data.ptr
    for plan in plans:
        start = time.perf_counter()
        device_plan = backend.attention.find([(0, plan)], config)
        if device_plan is None:
            raise RuntimeError("a plan just used is not cached: this is a bug")
        with backend.transfers.compute:
            backend.attention.enqueue(
                device_plan, config, 0, (on_device, on_device + q.nbytes, on_device + 2 * q.nbytes)
            )
        times["cached_launch_us"].append(time.perf_counter() - start)
        backend.transfers.finish()
    backend.close()
    return {name: [value * 1e6 for value in values[2:]] for name, values in times.items()}


def show(row: Row, result: Row) -> str:
    flat = f"  flat {result['flat_ms']:.4f}" if "flat_ms" in result else ""
    theirs = f"  FlashInfer {row['flashinfer_ms']:.4f} ms" if "flashinfer_ms" in row else ""
    if "invariant_ms" in result:
        flat += f"  invariant {result['invariant_ms']:.4f}, "
        flat += f"{result['invariant_speed']:.2f} of the speed"
    if "sinks_ms" in result:
        flat += f"  sinks {result['sinks_time']:.3f} of the time"
    met = "" if row["at_least"] is None or result["roofline"] >= row["at_least"] else "  SHORT"
    return (
        f"{row['name']:28} {result['ms']:8.4f} ms {result['tbps']:6.2f} TB/s "
        f"{result['tflops']:6.0f} TFLOP/s  roofline {result['roofline']:5.3f} "
        f"(at least {row['at_least']}, aim {row['aim']}){theirs}{flat}{met}"
    )


def check_fast(results: Sequence[Row]) -> None:
    """Ends the run with status 1 where a row is slower than with invariant numerics."""
    behind = [row for row in results if row.get("invariant_speed", 0.0) > MOST_SPEED]
    if behind:
        raise SystemExit(
            "faster with invariant numerics: "
            + "; ".join(f"{row['name']} {row['invariant_speed']:.3f}" for row in behind)
        )


def measure_cpu(batch: str, kv_lens: list[int]) -> dict[str, float]:
    """Prints the least and the median of each time of `cpu_cost`; returns the medians."""
    print(f"CPU, {batch}, {HOST_CALLS} calls each:")
    medians = {}
    for name, values in cpu_cost(kv_lens).items():
        print(f"{name:28} {min(values):8.1f} us least {median(values):8.1f} us median")
        medians[name] = round(median(values), 1)
    return medians


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--invariant", action="store_true", help="each row by these numerics, too")
    parser.add_argument("--sinks", action="store_true", help="each row with sinks, too")
    parser.add_argument("--random", type=int, metavar="N", help="workloads drawn at random instead")
    parser.add_argument("--seed", type=int, default=1, help="of --random")
    parser.add_argument("--profile", action="store_true", help="20 ms more of each, for a profiler")
    parser.add_argument("--mma-sync", action="store_true", help="without Hopper's wide kernel")
    arguments = parser.parse_args()
    if arguments.mma_sync and arguments.out:
        parser.error("--mma-sync replaces the kernels that the service runs: no --out with it")
    return arguments


def measure_random(ceilings: dict[str, float], chosen: argparse.Namespace) -> None:
    """Workloads drawn at random; the worst come last, of all that take long enough."""
    rows = random_rows(chosen.random, np.random.default_rng(chosen.seed))
    rows.sort(key=lambda row: (row["head_dim"], row["kv_dtype"], row["page_size"]))
    results = [(row, measure(row, ceilings, chosen)) for row in rows]
    long = [(row, result) for row, result in results if result["ms"] > LONG_MS]
    print(f"{len(results)} workloads, {len(long)} above {LONG_MS} ms; the worst of these:")
    for row, result in sorted(long, key=lambda one: one[1]["roofline"])[:10]:
        print(show(row, result))
    check_fast([result for _, result in results])


def main() -> None:
    arguments = parse_arguments()
    if arguments.mma_sync:
        wide.supports = lambda *_: False
    run = run_facts()
    ceilings = run["ceilings"]
    print(
        f"{run['device']}: read {ceilings['read_tbps']:.2f} TB/s, "
        f"matmul {ceilings['matmul_tflops']:.0f} TFLOP/s",
        flush=True,
    )
    if arguments.random:
        measure_random(ceilings, arguments)
        return
    results = []
    for row in workloads():
        if arguments.only not in row["name"]:
            continue
        results.append(measure(row, ceilings, arguments))
        print(show(row, results[-1]), flush=True)
    mixed = np.random.default_rng(0).integers(100, 3000, 256).tolist()
    batches = {"256 of 1024 keys": [1024] * 256, "256 of 100 to 3000 keys": mixed}
    cpu = {
        batch: measure_cpu(batch, kv_lens)
        for batch, kv_lens in batches.items()
        if arguments.only in f"cpu/{batch}"
    }
    if arguments.out is not None:
        write_results(arguments.out, run | {"cpu_us": cpu, "rows": results})
    check_fast(results)


if __name__ == "__main__":
    main()
