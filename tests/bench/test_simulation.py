"""The simulation: its pool is exact LRU, its processors share time, its fleet loses no request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.cache import exact_lru
from bench.cases.trace import (
    BLOCK_TOKENS,
    Request,
    generated_trace,
    multiplied,
    num_distinct,
    split,
)
from bench.driver.replay import PAGE, Called
from service.cluster.placement.cost import Load, Pace, choose
from simulation.block_pool import BlockPool
from simulation.calls import CallCosts, Replay, fit
from simulation.clock import Clock, Cores
from simulation.cluster import Clustered
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


def test_a_pool_that_is_held_refuses_and_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.hold((1, 2, 3)) == []
    assert pool.hold((1, 4), own=1) is None
    assert (pool.num_held, pool.match((1, 4))) == (3, 1)
    pool.release((1, 2, 3))
    assert pool.hold((7, 8)) == [3], "the end of the chain goes first"


@pytest.mark.parametrize(("cores", "ends"), [(1, [2.0, 3.0]), (2, [1.0, 2.0])])
def test_workers_share_processors(cores: float, ends: list[float]) -> None:
    clock, done = Clock(), []
    shared = Cores(clock, cores)
    for seconds in (1.0, 2.0):
        Worker(shared).give(seconds, lambda: done.append(clock.now))
    clock.run()
    assert done == pytest.approx(ends)


def test_a_process_that_had_nothing_to_do_takes_time_to_wake_up() -> None:
    clock, done = Clock(), []
    worker = Worker(Cores(clock, 1), wake_s=0.5)

    def note() -> None:
        done.append(clock.now)

    def again() -> None:
        note()
        worker.give(1.0, note)

    worker.give(1.0, again)
    worker.give(1.0, note)
    clock.run()
    assert done == [1.5, 2.5, 3.5], "once, not for what comes while it works"
    clock.at(10.0, lambda: worker.give(1.0, note))
    clock.run()
    assert done[3:] == [11.5] and worker.busy_s == pytest.approx(5.0)


def turns(*tasks: tuple[str, float, float], slice_s: float = 0.1) -> dict[str, float]:
    """When operations are over that come at once behind another: name, seconds, shared seconds."""
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


def test_a_round_has_a_slice_whatever_else_comes() -> None:
    clock = Clock()
    done: list[float] = []
    engine = Engine(Cores(clock, 1), 0.0, slice_s=0.1)

    def again() -> None:
        if len(done) < 20:
            engine.take(Task(0.1, 0.0, again))

    engine.take(Task(0.3, 0.0, lambda: done.append(clock.now)))
    engine.take(Task(0.1, 0.0, again))
    clock.run(until=1.0)
    assert done == [pytest.approx(0.5)], "three slices, and two others between them"


def test_operations_of_one_launch_take_what_they_share_once_and_end_together() -> None:
    told = turns(("a", 0.1, 0.0), ("b", 0.1, 0.06), ("c", 0.1, 0.06), ("d", 0.05, 0.0))
    assert told == {"a": 0.1, "b": 0.24, "c": 0.24, "d": 0.29}


def test_long_work_begins_in_the_round_after_a_launch_before_it() -> None:
    told = turns(("short", 0.1, 0.05), ("long", 0.2, 0.05), ("last", 0.1, 0.0))
    assert told == {"short": 0.1, "last": 0.2, "long": 0.4}


def test_processors_of_one_core_are_slower_together() -> None:
    clock, done = Clock(), []
    shared = Cores(clock, 2, together=0.5)
    for seconds in (1.0, 2.0):
        Worker(shared).give(seconds, lambda: done.append(clock.now))
    clock.run()
    assert done == pytest.approx([2.0, 3.0])


def test_one_worker_takes_the_sum_of_its_calls_and_two_services_share_nothing_but_cores() -> None:
    some = TRACE[:20]
    serial = Replay(COSTS, 2, [10_000])
    told = serial.run([some], workers=1)
    assert serial.num_calls == 20 * 8
    busy = serial.caller.busy_s + sum(
        one.door.busy_s + one.engine.busy_s for one in serial.services
    )
    assert 20 / told["requests_per_s"] == pytest.approx(busy, rel=1e-2)
    some = TRACE[:150]
    one = Replay(COSTS, 3, [10_000]).run([some], workers=8)
    two = Replay(COSTS, 6, [10_000, 10_000]).run(split(some, 2), workers=4)
    assert two["requests_per_s"] > 1.2 * one["requests_per_s"]
    assert two["hit_rate"] == pytest.approx(one["hit_rate"], abs=0.01)


def test_a_cluster_keeps_what_begins_alike_together_and_computes_it_once() -> None:
    some = TRACE[:150]
    separate = Replay(COSTS, 6, [10_000] * 2, seed=1).run(split(some, 2), workers=4)
    cluster = Clustered(COSTS, 6, [10_000] * 2, seed=1)
    told = cluster.replay(some, workers=8)
    assert cluster.num_calls == 150 * 8
    assert told["hit_rate"] >= separate["hit_rate"]
    assert told["requests_per_s"] > 0.8 * separate["requests_per_s"]
    assert not cluster.waiting, "whoever waited has gone on"
    for one in cluster.knows.values():
        assert (one.held, one.unwritten, one.num_waiting) == (0, 0, 0)
    again = Clustered(COSTS, 6, [10_000] * 2, seed=1).replay(some, workers=8)
    assert again == told
    other = Clustered(COSTS, 6, [10_000] * 2, seed=2).replay(some, workers=8)
    assert other["p50_ms"] != told["p50_ms"]


def test_a_prompt_waits_in_a_cluster_for_one_that_it_begins_with() -> None:
    long = Request(0.0, tuple(range(400)), 400 * 512, 1)
    alone = Clustered(COSTS, 6, [10_000] * 2).replay([long], workers=1)
    both = Clustered(COSTS, 6, [10_000] * 2)
    between = [Request(0.0, (1000 + n,), 512, 1) for n in range(3)]
    both.replay([long, *between, long], workers=2)
    assert both.cached == 400 * PAGE
    assert max(both.request_s) < 1.5e-3 * alone["p50_ms"], "beside one that computes nothing"


def test_costs_are_fitted_from_calls_and_compared_with_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    calls = []
    for kind in COSTS.seconds:
        for new, pairs in rng.integers(1, 10_000, (50, 2)).tolist():
            cpu = tuple(COSTS.of(kind, new, pairs))
            calls.append(Called(kind, new, pairs, sum(cpu) + 1e-4, cpu))
    fitted = CallCosts.fitted(calls, 0.02)
    for kind in COSTS.seconds:
        np.testing.assert_allclose(fitted.of(kind, 500, 900), COSTS.of(kind, 500, 900), rtol=1e-6)
        assert fitted.waiting_s[kind] == pytest.approx(1e-4)
    some = TRACE[:100]
    measured: dict[str, Any] = {"pages_each": 5000, "engines": 2, "cores": 2, "rows": []}
    for name, pools, workers in (("one", [10_000], 8), ("separate", [5000] * 2, 4)):
        run = Replay(COSTS, 2, pools).run(split(some, len(pools)), workers)
        measured["rows"].append({"name": name, **run, "spread": dict.fromkeys(run, 0.0)})
    rows = compare(measured, CallCosts.told(fitted.document()), some)
    assert all(row.holds and abs(row.off) < 0.02 for row in rows), rows
    slower = {"p99_ms": 2 * measured["rows"][0]["p99_ms"]}
    measured["rows"][0] |= slower
    assert [row.figure for row in compare(measured, fitted, some) if not row.holds] == ["p99_ms"]


def test_a_line_is_found_and_never_below_nothing() -> None:
    line = Line.through([(amount, 5e-6 + amount / 4e12) for amount in (1e6, 1e8, 1e9)])
    assert line.fixed_s == pytest.approx(5e-6) and line.per_s == pytest.approx(4e12)
    steep = fit(np.array([[1.0, 1, 1], [1, 2, 4], [1, 3, 9]]), np.array([0.0, 1.0, 3.0]))
    assert (steep >= 0).all()


def test_the_measured_tables_give_costs() -> None:
    half, fp8 = GpuCosts.measured(fp8=False), GpuCosts.measured(fp8=True)
    assert 3e12 < fp8.decode.per_s < 5e12 and 4e14 < half.prefill.per_s < 8e14
    assert 0 < fp8.hand_over_s < 1e-4 and 0 < Links.measured().host_s < 1e-4


def test_copies_of_a_trace_share_nothing_and_come_at_the_rate_asked_for() -> None:
    every = multiplied(TRACE, 40.0, 20.0)
    assert len(every) == pytest.approx(800, rel=0.1)
    assert [one.at for one in every] == sorted(one.at for one in every)
    assert every[-1].at < 20.0
    first = {request.blocks[0] for request in every}
    assert len(first) > len({request.blocks[0] for request in TRACE})
    shares = split(TRACE, 3)
    assert sum(map(len, shares)) == len(TRACE)
    begins = [{one.blocks[0] for one in share} for share in shares]
    assert not begins[0] & begins[1] | begins[1] & begins[2]


def test_a_prompt_goes_to_its_prefix_unless_that_engine_is_too_full_or_too_busy() -> None:
    placing = Placing(3, 100, Pace(page_s=1e-3))
    placing.took(1, (1, 2, 3, 4), (), 4, 0.0)
    assert placing.match((1, 2, 9)) == (2, 1)
    assert placing.place((1, 2, 3, 4, 5), 0.0) == 1
    placing.waits(1, 100.0)
    assert placing.place((1, 2, 3, 4, 6), 0.0) != 1
    placing.waits(1, 0.0)
    placing.holds(1, 97)
    assert placing.place((1, 2, 3, 4, 7), 0.0) != 1
    placing.lose(1, (1, 2, 3, 4))
    assert placing.match((1, 2)) == (0, None)


def test_an_engine_has_its_work_until_its_time_is_over() -> None:
    placing = Placing(2, 10_000, Pace(page_s=1e-2, read_s=0.0))
    first = placing.place(range(30), 0.0)  # 9.6 s of work
    other = placing.place(range(100, 110), 1.0)  # 3.2 s
    assert first != other
    assert placing.place(range(200, 201), 2.0) == other
    assert placing.place(range(300, 310), 9.0) == other, "which has been idle for longer"
    assert placing.place(range(400, 401), 9.7) == first


def test_a_prompt_goes_where_the_routers_own_rule_sends_it() -> None:
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


def test_every_request_is_answered_once_and_more_engines_are_no_slower() -> None:
    every = multiplied(TRACE, 20.0, 10.0)
    firsts = []
    for engines in (2, 8):
        told = Simulation(replace(FLEET, engines=engines), GPU).run(every)
        assert len(told.outcomes) + told.refused == len(every)
        assert all(one.cached < one.tokens for one in told.outcomes)
        assert all(0 < one.first_s <= one.whole_s for one in told.outcomes)
        firsts.append(np.percentile([one.first_s for one in told.outcomes], 50))
    assert firsts[1] <= firsts[0]


def test_a_request_alone_takes_what_its_work_does() -> None:
    request = replace(TRACE[0], at=0.0, blocks=tuple(range(4)), tokens=4 * BLOCK_TOKENS, output=10)
    told = Simulation(replace(FLEET, engines=1), GPU).run([request])
    (one,) = told.outcomes
    model, tokens = FLEET.model, request.tokens
    layer_s = GPU.prefill.seconds(tokens * tokens / 2 * model.pair_flops)
    layer_s += GPU.append.seconds(tokens * model.layer_bytes) + GPU.hand_over_s
    wanted = FLEET.router_s + FLEET.model_s + model.num_layers * layer_s
    assert one.first_s == pytest.approx(wanted)
    layer_s = GPU.decode.seconds((tokens + 4.5) * model.layer_bytes) + GPU.hand_over_s
    wanted = 10 * (FLEET.model_s + model.num_layers * layer_s)
    assert one.whole_s - one.first_s == pytest.approx(wanted, rel=1e-3)


def test_requests_of_a_lost_rack_begin_anew_and_are_all_answered() -> None:
    every = multiplied(TRACE, 20.0, 10.0)
    calm = Simulation(FLEET, GPU).run(every)
    told = Simulation(FLEET, GPU).run(every, lose_rack_at=5.0)
    assert told.lost and not calm.lost
    assert len(told.outcomes) == len(calm.outcomes) == len(every)
    worst = [max(one.first_s for one in run.outcomes) for run in (calm, told)]
    assert worst[0] <= worst[1]


def test_a_long_sequence_is_only_over_engines_that_hold_it_and_faster_over_more_of_a_host() -> None:
    rows = long_rows(Setting(GPU, Model(), Links.measured(), 120e9))
    assert all(row.pool_share <= 1.0 for row in rows)
    assert min(row.engines for row in rows if row.tokens == 10 * 2**20) >= 6
    million = {row.engines: row for row in rows if row.tokens == 2**20}
    assert million[8].decode_ms < million[4].decode_ms < million[1].decode_ms
    assert all(row.prefill_in_pieces_s <= row.prefill_s for row in rows)
