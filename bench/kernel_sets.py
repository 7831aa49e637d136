"""Which set of kernels is fastest, batch by batch: `python -m bench.kernel_sets`.

    python -m bench.kernel_sets measure TIMES.json [--random N] [--seeds 1 2 3]
    python -m bench.kernel_sets fit TIMES.json [TIMES.json ...] [--steps N]

`measure` times the attention of workloads.json, and N random rows of each seed, by every set of
kernels and with invariant numerics, in turn. `fit` varies `SetCosts` at random and prints those by
which `attention/choice.py` loses least on such times. Rows of odd places are not fitted to: what is
gained there is what new batches gain.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import cupy
import numpy as np

from bench.cases.kernel_calls import attend_call, fill_pool
from bench.cases.kernel_plans import Row, config_of, pool_plan
from bench.cases.random_rows import random_rows
from bench.kernels import Replay
from bench.report.provenance import workloads
from kernels.backend import Plan, split_keys
from kernels.cuda.attention import device_plan
from kernels.cuda.attention.choice import batch_kind
from kernels.cuda.attention.kernel_sets import SPLIT_KEYS, kernel_sets, unit_costs
from kernels.cuda.attention.runner import AttentionRunner
from kernels.cuda.backend import CudaBackend
from kernels.cuda.kv.pool import pool_view
from kernels.cuda.plan.costs import H200, SetCosts
from kernels.cuda.specs import service_specs

TURNS: Final = 7
INVARIANT: Final = "invariant"
BEHIND: Final = 2.5
"""Weight of what is lost beside invariant numerics, in addition to that beside the fastest set."""
FAR: Final = 0.02
"""Weight of squares of the logarithms of how far constants move: few rows decide each."""
SPREAD: Final = 0.08


def measure(row: Row) -> dict[str, Any]:
    """Microseconds of a row by each set, and with invariant numerics."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    geometry, plan = pool_plan(row)
    backend = CudaBackend(geometry)
    fill_pool(backend)
    config, arch, layers = config_of(row, backend.kv), backend.library.arch, geometry.num_layers
    pool = (geometry.head_dim, geometry.dtype, geometry.page_size)
    backend.library.prepare(service_specs(arch, *pool, INVARIANT))
    here = (backend.library, backend.transfers, backend.multiprocessors)
    splits = split_keys(INVARIANT, SPLIT_KEYS, geometry.page_size)
    fast, exact = backend.attention, AttentionRunner(*here, splits, geometry.page_size)
    sets = kernel_sets(config.shape, arch, backend.multiprocessors)
    times: dict[str, list[float]] = {}
    replays, owners = {}, []
    for name in (*sets, INVARIANT):
        backend.attention = exact if name == INVARIANT else fast
        device_plan.batch_kind = batch_kind if name == INVARIANT else lambda *_, k=name: k
        made = backend.attention.make([(0, plan)], config)
        call, held = attend_call(row, backend, config, made, len(plan.positions))
        replays[name] = Replay.of(lambda i, call=call: call(i % layers, False), max(6, layers))
        owners.append((made, held))
    device_plan.batch_kind = batch_kind
    for turn in range(TURNS):
        for name in sorted(replays, reverse=turn % 2 == 1):
            times.setdefault(name, []).append(replays[name].ms() * 1e3)
    backend.close()
    return {"row": row, "us": {name: round(median(found), 3) for name, found in times.items()}}


@dataclass(frozen=True, slots=True)
class Timed:
    """A row's times, with what its choice is made from."""

    us: Mapping[str, float]
    plan: Plan
    sets: Mapping[Any, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Timed:
        geometry, plan = pool_plan(record["row"])
        config = config_of(record["row"], pool_view(geometry, geometry.groups[geometry.leading], 0))
        return cls(record["us"], plan, kernel_sets(config.shape, "sm_90a", H200.multiprocessors))

    def chosen(self, costs: SetCosts) -> float:
        """Microseconds by the set that these costs choose."""
        sets = {
            kind: one if one.largest is None else replace(one, unit=unit_costs(one.largest, costs))
            for kind, one in self.sets.items()
        }
        return self.us[batch_kind([self.plan], sets["usual"].planner, sets, costs)]


def losses(rows: Sequence[Timed], costs: SetCosts) -> tuple[float, float, int]:
    """Means of the logarithms of what is lost beside the fastest set and beside `invariant`, and
    how many rows are slower than that by 1 %."""
    beside, behind = [], []
    for row in rows:
        took, exact = row.chosen(costs), row.us[INVARIANT]
        beside.append(math.log(took / min(us for k, us in row.us.items() if k != INVARIANT)))
        behind.append(max(0.0, math.log(took / exact / 1.01)))
    return mean(beside), mean(behind), sum(one > 0 for one in behind)


def scaled(costs: Any, factors: Iterator[float]) -> Any:
    """All numbers of a record times the next factor each."""
    if isinstance(costs, float):
        return costs * next(factors)
    if isinstance(costs, Mapping):
        return {key: scaled(value, factors) for key, value in costs.items()}
    values = {field.name: scaled(getattr(costs, field.name), factors) for field in fields(costs)}
    return replace(costs, **values)


def fit(rows: Sequence[Timed], steps: int) -> SetCosts:
    """Constants for which the score of every other row is least, found by random steps."""
    rng, numbers = np.random.default_rng(0), itertools.count()
    best: SetCosts = scaled(H200.sets, (1.0 for _ in numbers))
    moved, least = np.zeros(next(numbers)), math.inf
    for number in range(steps):
        step = moved.copy()
        if number:
            step[rng.integers(len(step), size=2)] += rng.normal(0, SPREAD, 2)
        costs = scaled(H200.sets, iter(np.exp(step).tolist()))
        beside, behind, _ = losses(rows[::2], costs)
        if (score := beside + BEHIND * behind + FAR * float(step @ step)) < least:
            best, least, moved = costs, score, step
    for name, costs in (("before", H200.sets), ("after", best)):
        print(name, "fitted rows", losses(rows[::2], costs), "others", losses(rows[1::2], costs))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("times", type=Path, nargs="+")
    parser.add_argument("--random", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=2000)
    chosen = parser.parse_args()
    if chosen.what == "fit":
        records = [one for path in chosen.times for one in json.loads(path.read_text())]
        print(fit([Timed.of(record) for record in records], chosen.steps))
        return
    rows = [row for row in workloads() if row["kind"] not in ("append", "merge")]
    rows = [row for row in rows if row.get("storage") != "ragged"]
    for seed in chosen.seeds:
        rows += random_rows(chosen.random, np.random.default_rng(seed))
    chosen.times[0].write_text(json.dumps([measure(row) for row in rows]))


if __name__ == "__main__":
    main()
