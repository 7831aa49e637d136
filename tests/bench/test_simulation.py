"""The simulation: an exact LRU pool, the router's rule, the time of work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.cache import exact_lru
from bench.cases.trace import BLOCK_TOKENS, generated_trace, multiplied, num_distinct
from service.cluster.placement.cost import EngineLoad, choose
from simulation.block_pool import BlockPool
from simulation.fleet import Fleet, Simulation
from simulation.gpu_costs import GpuCosts, Line
from simulation.placement import PAGES, Placing

TRACE = generated_trace(300, seed=1)
GPU = GpuCosts(
    decode=Line(5e-6, 4e12),
    prefill=Line(9e-5, 6e14),
    append=Line(9e-6, 4e12),
    hand_over_s=3e-5,
)
FLEET = Fleet(engines=8)


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
def test_a_pool_hits_what_exact_lru_does(share: float) -> None:
    capacity = max(80, int(share * num_distinct(TRACE)))
    pool, hits, total = BlockPool(capacity), 0, 0
    for request in TRACE:
        hits += pool.match(request.blocks)
        total += len(request.blocks)
        assert pool.hold(request.blocks) is not None
        assert pool.num_held <= capacity
        pool.release(request.blocks)
    wanted = exact_lru([np.array(one.blocks, np.int64) for one in TRACE], 1, capacity)
    assert hits / total == pytest.approx(wanted)


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
            load = EngineLoad(PAGES * total - pages, held=pages, queue_s=waited_s, pace=pace)
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
    assert one.answer_s == pytest.approx(wanted, rel=1e-3)


def test_all_requests_of_a_fleet_are_answered() -> None:
    every = multiplied(TRACE, 20.0, 10.0)
    run = Simulation(FLEET, GPU).run(every)
    assert len(run.outcomes) == len(every) and not run.refused
    assert all(one.begun < one.first < one.ended for one in run.outcomes)
