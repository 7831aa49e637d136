"""The simulation: an exact LRU pool, shared processors, the router's rule, no lost request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.cache import exact_lru
from bench.cases.trace import (
    BLOCK_TOKENS,
    generated_trace,
    multiplied,
    num_distinct,
    split,
)
from bench.driver.replay import CallRecord
from service.cluster.placement.cost import Load, choose
from simulation.block_pool import BlockPool
from simulation.calls import CallCosts, Replay
from simulation.clock import Clock, Cores
from simulation.comparison import compare
from simulation.fleet import Fleet, Simulation
from simulation.gpu_costs import GpuCosts, Line, Model
from simulation.long_sequences import Links, Setting, long_rows
from simulation.placement import PAGES, Placing
from simulation.workers import Engine, Task, Worker

TRACE = generated_trace(300, seed=1)
COSTS = CallCosts(
    {
        kind: [[1e-3, 0.0, 0.0], [1e-3, 0.0, 0.0], [2e-3, 1e-6, 1e-8]]
        for kind in ("create", "prefill", "decode", "commit", "delete")
    },
    dict.fromkeys(("create", "prefill", "decode", "commit", "delete"), 0.0),
    slice_s=0.02,
)
GPU = GpuCosts(
    decode=Line(5e-6, 4e12),
    prefill=Line(9e-5, 6e14),
    append=Line(9e-6, 4e12),
    merge=Line(1e-6, 4e12),
    hand_over_s=3e-5,
)
FLEET = Fleet(engines=8, engines_per_rack=2, back_s=5.0)


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
def test_a_pool_hits_what_exact_lru_does(share: float) -> None:
    capacity = max(80, int(share * num_distinct(TRACE)))
    pool, hits, total = BlockPool(capacity), 0, 0
    for request in TRACE:
        hits += pool.match(request.blocks)
        total += len(request.blocks)
        assert pool.hold(request.blocks) is not None
        assert pool.num_held <= capacity and len(pool.every()) <= capacity
        pool.release(request.blocks)
    wanted = exact_lru([np.array(one.blocks, np.int64) for one in TRACE], 1, capacity)
    assert hits / total == pytest.approx(wanted)


@pytest.mark.parametrize(("cores", "ends"), [(1, [2.0, 3.0]), (2, [1.0, 2.0])])
def test_workers_share_processors(cores: float, ends: list[float]) -> None:
    clock, done = Clock(), []
    shared = Cores(clock, cores)
    for seconds in (1.0, 2.0):
        Worker(shared).give(seconds, lambda: done.append(clock.now))
    clock.run()
    assert done == pytest.approx(ends)


def turns(*tasks: tuple[str, float, float], slice_s: float = 0.1) -> dict[str, float]:
    """End times of operations (name, seconds, shared seconds) that arrive behind another one."""
    clock, done = Clock(), {}
    engine = Engine(Cores(clock, 1), 0.0, slice_s)
    engine.take(Task(0.0, 0.0, lambda: None))
    for name, seconds, shared in tasks:
        engine.take(Task(seconds, shared, lambda name=name: done.update({name: clock.now})))  # type: ignore[misc]
    clock.run()
    return {name: round(at, 6) for name, at in done.items()}


def test_a_short_operation_waits_for_a_slice_of_a_long_one_and_no_more() -> None:
    clock = Clock()
    done: dict[str, float] = {}
    engine = Engine(Cores(clock, 1), 0.0, slice_s=0.1)
    engine.take(Task(1.0, 0.0, lambda: done.setdefault("long", clock.now)))
    engine.take(Task(0.05, 0.0, lambda: done.setdefault("short", clock.now)))
    clock.run()
    assert done == {"short": pytest.approx(0.15), "long": pytest.approx(1.05)}


def test_operations_of_one_launch_take_shared_time_once_and_end_together() -> None:
    ends = turns(("a", 0.1, 0.0), ("b", 0.1, 0.06), ("c", 0.1, 0.06), ("d", 0.05, 0.0))
    assert ends == {"a": 0.1, "b": 0.24, "c": 0.24, "d": 0.29}


def test_one_worker_takes_the_sum_of_its_calls_and_two_services_share_only_cores() -> None:
    some = TRACE[:20]
    serial = Replay(COSTS, 2, [10_000])
    run = serial.run([some], workers=1)
    assert serial.num_calls == 20 * 8
    busy = serial.caller.busy_s + sum(
        one.door.busy_s + one.engine.busy_s for one in serial.services
    )
    assert 20 / run["requests_per_s"] == pytest.approx(busy, rel=1e-2)
    some = TRACE[:150]
    one = Replay(COSTS, 3, [10_000]).run([some], workers=8)
    two = Replay(COSTS, 6, [10_000, 10_000]).run(split(some, 2), workers=4)
    assert two["requests_per_s"] > 1.2 * one["requests_per_s"]
    assert two["hit_rate"] == pytest.approx(one["hit_rate"], abs=0.01)


def test_costs_are_fitted_from_calls_and_compared_with_measurements() -> None:
    rng = np.random.default_rng(0)
    calls = []
    for kind in COSTS.seconds:
        for new, pairs in rng.integers(1, 10_000, (50, 2)).tolist():
            cpu = tuple(COSTS.of(kind, new, pairs))
            calls.append(CallRecord(kind, new, pairs, sum(cpu) + 1e-4, cpu))
    fitted = CallCosts.fitted(calls, 0.02)
    for kind in COSTS.seconds:
        np.testing.assert_allclose(fitted.of(kind, 500, 900), COSTS.of(kind, 500, 900), rtol=1e-6)
        assert fitted.waiting_s[kind] == pytest.approx(1e-4)
    some = TRACE[:100]
    measured: dict[str, Any] = {"pages_each": 5000, "engines": 2, "cores": 2, "rows": []}
    for name, pools, workers in (("one", [10_000], 8), ("separate", [5000] * 2, 4)):
        run = Replay(COSTS, 2, pools).run(split(some, len(pools)), workers)
        measured["rows"].append({"name": name, **run, "spread": dict.fromkeys(run, 0.0)})
    rows = compare(measured, CallCosts.of_document(fitted.document()), some)
    assert all(row.holds and abs(row.off) < 0.02 for row in rows), rows
    slower = {"p99_ms": 2 * measured["rows"][0]["p99_ms"]}
    measured["rows"][0] |= slower
    assert [row.figure for row in compare(measured, fitted, some) if not row.holds] == ["p99_ms"]


def test_a_prompt_goes_to_the_engine_that_the_routers_rule_chooses() -> None:
    rng = np.random.default_rng(4)
    pace = FLEET.pace(GPU)
    for _ in range(300):
        total, needed, matched = 1000, int(rng.integers(1, 90)), int(rng.integers(0, 90))
        matched = min(matched, needed)
        held, queue_s = rng.integers(0, 1000, 5), rng.random(5) * rng.integers(0, 3)
        placing, loads = Placing(5, total, pace), {}
        for engine in range(5):
            placing.took(engine, (), (), int(held[engine]), float(queue_s[engine]))
            pages, waited_s = PAGES * int(held[engine]), float(queue_s[engine])
            load = Load(PAGES * total - pages, held=pages, queue_s=waited_s, pace=pace)
            loads[str(engine)] = load
        blocks = tuple(range(needed))
        if matched:
            placing.took(2, blocks[:matched], (), int(held[2]), float(queue_s[2]))
        wanted = choose(loads, {"2": PAGES * matched}, PAGES * needed)
        assert placing.place(blocks, 0.0) == int(wanted), (held, queue_s, needed, matched)


def test_a_single_request_takes_the_time_of_its_work() -> None:
    request = replace(TRACE[0], at=0.0, blocks=tuple(range(4)), tokens=4 * BLOCK_TOKENS, output=10)
    run = Simulation(replace(FLEET, engines=1), GPU).run([request])
    (one,) = run.outcomes
    model, tokens = FLEET.model, request.tokens
    layer_s = GPU.prefill.seconds(tokens * tokens / 2 * model.pair_flops)
    layer_s += GPU.append.seconds(tokens * model.layer_bytes) + GPU.hand_over_s
    wanted = FLEET.router_s + FLEET.model_s + model.num_layers * layer_s
    assert one.first_s == pytest.approx(wanted)
    layer_s = GPU.decode.seconds((tokens + 4.5) * model.layer_bytes) + GPU.hand_over_s
    wanted = 10 * (FLEET.model_s + model.num_layers * layer_s)
    assert one.whole_s - one.first_s == pytest.approx(wanted, rel=1e-3)


def test_requests_of_a_lost_rack_restart_and_are_all_answered() -> None:
    every = multiplied(TRACE, 20.0, 10.0)
    calm = Simulation(FLEET, GPU).run(every)
    disturbed = Simulation(FLEET, GPU).run(every, lose_rack_at=5.0)
    assert disturbed.lost and not calm.lost
    assert len(disturbed.outcomes) == len(calm.outcomes) == len(every)
    worst = [max(one.first_s for one in run.outcomes) for run in (calm, disturbed)]
    assert worst[0] <= worst[1]


def test_a_long_sequence_is_faster_over_more_engines_of_a_host() -> None:
    rows = long_rows(Setting(GPU, Model(), Links.measured(), 120e9))
    assert all(row.pool_share <= 1.0 for row in rows)
    assert min(row.engines for row in rows if row.tokens == 10 * 2**20) >= 6
    million = {row.engines: row for row in rows if row.tokens == 2**20}
    assert million[8].decode_ms < million[4].decode_ms < million[1].decode_ms
    assert all(row.prefill_in_pieces_s <= row.prefill_s for row in rows)
