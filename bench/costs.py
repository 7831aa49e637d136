"""The planner's estimates beside measured time: `python -m bench.costs [--only cascade]`.

Every attention row of the kernels' results is planned as it was measured; what its batch should
take is put together from the costs that the planner goes by (`TileShape`, rounds.py) and the bytes
of the row. Needs no device.
"""

from __future__ import annotations

import argparse
from heapq import heapify, heapreplace
from statistics import median
from typing import Any, Final, cast

import numpy as np

from bench.digests import machine_of
from bench.kernel_results import read_results, run_of
from bench.launches import attended
from bench.machine import workloads
from bench.recorder import MEMORY, recording
from bench.row_plans import Row
from kernels.cuda.attention.device_plan import DevicePlanBuilder
from kernels.cuda.plan.planner import BatchWork, make_work
from kernels.cuda.plan.rounds import MERGE_SECONDS, PARTIAL_SECONDS
from kernels.cuda.plan.runs import KernelWork
from kernels.cuda.plan.tiles import KEYS

LAUNCH_SECONDS: Final = 4e-6
"""Between two calls of a graph, beside what their kernels do."""
REACHED: Final = 0.96
"""Of the read ceiling, where nothing else limits a batch."""


def row_seconds(row: Row, run: dict[str, Any]) -> float:
    """What an attention row should take on the machine of a run."""
    machine = machine_of(run)
    with recording(machine.arch) as recorder:
        config, plan = attended(row)
        library, heads = cast(Any, recorder), config.kv.num_kv_heads
        builder = DevicePlanBuilder(config, library, machine.multiprocessors, MEMORY)
        work = make_work([(0, plan)], builder.kernels_for([plan]).planner)
    floor = row["bytes"] / (REACHED * run["ceilings"]["read_tbps"] * 1e12)
    return LAUNCH_SECONDS + max(floor, kernels_seconds(work, heads)) + merge_seconds(work, heads)


def kernels_seconds(work: BatchWork, heads: int) -> float:
    """When the last kernel ends: persistent ones at once, the others on what these leave."""
    end, taken = 0.0, 0.0
    for launch in work.kernels:
        shape = launch.shape
        if shape.persistent:
            end = max(end, persistent_seconds(launch))
            taken = launch.num_workers * launch.team * heads / shape.workers
        else:
            late = round(shape.workers * min(1.0, taken))
            free = [0.0] * (shape.workers - late) + [end] * late
            costs = shape.item_seconds + granules(launch, 1) * shape.key_seconds
            return max(end, queued_seconds(free, np.sort(costs)[::-1].repeat(heads).tolist()))
    return end


def persistent_seconds(launch: KernelWork) -> float:
    """When the last team has done its list of items."""
    costs = launch.shape.item_seconds + granules(launch, launch.team) * launch.shape.key_seconds
    return float(np.add.reduceat(costs, launch.worker_begin[:-1]).max())


def granules(launch: KernelWork, team: int) -> Any:
    """Keys of each item that one worker of a team goes through, in whole granules."""
    granule = launch.shape.granule
    return -(launch.items[:, KEYS] // -(granule * team)) * granule


def queued_seconds(free: list[float], costs: list[float]) -> float:
    """When the last of some units ends, each taken by the worker that is free first."""
    heapify(free)
    end = 0.0
    for cost in costs:
        done = free[0] + cost
        heapreplace(free, done)
        end = max(end, done)
    return end


def merge_seconds(work: BatchWork, heads: int) -> float:
    """What the merge adds, its partial states written and read again."""
    if len(work.merges.chunks) == 0:
        return 0.0
    return MERGE_SECONDS + work.merges.num_partial_rows * heads * PARTIAL_SECONDS


def errors(only: str = "") -> dict[str, tuple[float, float]]:
    """(predicted, measured) milliseconds of attention rows whose names contain `only`, by name."""
    results = read_results()
    measured, pairs = {row["name"]: row for row in results["rows"]}, {}
    for row in workloads():
        name = row["name"]
        if only in name and name in measured and row["kind"] not in ("append", "merge"):
            ms = 1e3 * row_seconds(row, run_of(results, measured[name]))
            pairs[name] = (ms, measured[name]["ms"])
    return pairs


def median_error(pairs: dict[str, tuple[float, float]]) -> float:
    """The median of how far predictions are off, as a part of what was measured."""
    return median(abs(predicted / ms - 1) for predicted, ms in pairs.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    pairs = errors(parser.parse_args().only)
    for name, (predicted, ms) in pairs.items():
        told = f"predicted {predicted:8.4f} ms, measured {ms:8.4f}"
        print(f"{name:40} {told}, {predicted / ms - 1:+.2f}")
    print(f"median error {median_error(pairs):.3f} of {len(pairs)} rows")


if __name__ == "__main__":
    main()
