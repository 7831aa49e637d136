"""The wide kernel alone on a device: states against float64, and TFLOP/s of its real sizes.

`python -m bench.wide check [GROUP ...]` prints one line per case and exits 1 if one is wrong;
`python -m bench.wide time [VARIANT ...] [-- CASE ...]` prints milliseconds and TFLOP/s.
Work items come from the backend's planner with the wide tile as its only shape; partial states are
merged in torch, so that nothing but the kernel under test is CuPy's.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.wide_cases import case_variant, groups, timed_cases
from bench.wide_device import Bench, launch_errors, load

TOLERANCE: Final = {"fp16": 1e-3, "bf16": 1e-2}


def check(name: str) -> int:
    wrong = 0
    for number, case in enumerate(groups()[name]):
        for repeat, (error_o, error_lse) in enumerate(launch_errors(case, number)):
            bad = not (error_o <= TOLERANCE[case.dtype] and error_lse <= 1e-3)
            wrong += bad
            if bad or repeat == 0:
                mark = "WRONG" if bad else "ok"
                print(f"{mark} {name} o {error_o:.2e} lse {error_lse:.2e} {case}", flush=True)
    return wrong


@dataclass(frozen=True, slots=True)
class Variant:
    """A change to try: the kernel's shape, the order of the units."""

    shape: dict[str, int | bool]
    bucketed: bool = False
    head_block: int = 0
    skip: bool = True


VARIANTS: Final[dict[str, Variant]] = {
    "base": Variant({}),
    "1-head": Variant({}, head_block=1),
    "2-heads": Variant({}, head_block=2),
    "4-heads": Variant({}, head_block=4),
    "8-heads": Variant({}, head_block=8),
    "buckets": Variant({}, True),
    "no-skip": Variant({}, skip=False),
    "1-query": Variant({"query_stages": 1}),
    "shared-q": Variant({"query_registers": False}),
}


def measure(bench: Bench, kernel: Any, calls: int = 6, replays: int = 7) -> float:
    """Median milliseconds of one call, from replays of a graph of `calls`."""
    torch = bench.torch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bench.launch(kernel)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            bench.launch(kernel)
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return float(np.median(times[1:]))


def time_cases(variants: list[str], cases: list[str]) -> None:
    for case_name in cases:
        for variant_name in variants:
            case = timed_cases()[case_name]
            change = VARIANTS[variant_name]
            variant = dataclasses.replace(case_variant(case), **change.shape)  # type: ignore[arg-type]
            case = dataclasses.replace(
                case,
                granule=variant.tile_keys,
                bucketed=change.bucketed,
                head_block=min(change.head_block, case.num_kv_heads),
            )
            try:
                bench = Bench(case, variant, seed=1, poison=False, skip=change.skip)
                kernel = load(variant)
                bench.launch(kernel)
                bench.torch.cuda.synchronize()
                error = bench.errors(sample=24)[0] if not bench.work.merges.members.size else -1.0
                ms = measure(bench, kernel)
                print(
                    f"{case_name:14} {variant_name:14} {ms:8.4f} ms {case.flops / ms / 1e9:7.1f}"
                    f" TFLOP/s  error {error:.1e}  items {len(bench.items)}"
                    f" partial rows {bench.work.merges.num_partial_rows}",
                    flush=True,
                )
            except RuntimeError as problem:
                print(f"{case_name:14} {variant_name:14} failed: {problem}", flush=True)


def main(arguments: list[str]) -> int:
    started = time.time()
    if arguments[0] == "check":
        wrong = sum(check(name) for name in arguments[1:] or groups())
        print(f"{wrong} wrong, {time.time() - started:.0f} s")
        return 1 if wrong else 0
    chosen = arguments[1:]
    split = chosen.index("--") if "--" in chosen else len(chosen)
    time_cases(chosen[:split] or ["base"], chosen[split + 1 :] or list(timed_cases()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
