"""Identities: cascade = flat, batched = single, several requests together = each alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import oracle
import pytest
from pooled import Pooled, Run, bars, check, expected, int32, normal, positions

from kernels.backend import Attend, AttentionState, Level, Plan, PoolGeometry, Scoring
from kernels.masks import make_mask

HEADS, KV_HEADS, DIM = 8, 2, 64


def geometry(num_pages: int, page_size: int = 4, layout="NHD", dtype="fp16", layers: int = 1):
    return PoolGeometry(layers, num_pages, page_size, KV_HEADS, DIM, layout, dtype, 0.02, 0.03)


def join(runs: list[Run]) -> Run:
    """One sequence's KV from the runs on its path: every run but the last fills its pages."""
    return Run(
        np.concatenate([run.pages for run in runs]),
        np.concatenate([run.k for run in runs]),
        np.concatenate([run.v for run in runs]),
    )


@dataclass(frozen=True, slots=True)
class Tree:
    """Per level, groups (first sequence, end, run); and each sequence's whole KV."""

    levels: list[list[tuple[int, int, Run]]]
    whole: list[Run]


def grow(pooled: Pooled, rng: np.random.Generator, sequences: int, depth: int) -> Tree:
    """A random ragged tree: any group may be empty, leaves are of any length."""
    groups, levels, paths = [(0, sequences)], [], [[] for _ in range(sequences)]
    size = pooled.backend.geometry.page_size
    for level in range(depth):
        last = level == depth - 1
        cuts: list[tuple[int, int]] = []
        for begin, end in groups:
            inner = range(begin + 1, end)
            at = inner if last else rng.choice(inner, min(len(inner), 2), replace=False)
            edges = [begin, *sorted(int(x) for x in at), end]
            cuts += list(pairwise(edges))
        groups, nodes = cuts, []
        for begin, end in groups:
            keys = int(rng.integers(0, 30)) if last else size * int(rng.integers(0, 6))
            run = pooled.add(keys)
            nodes.append((begin, end, run))
            for sequence in range(begin, end):
                paths[sequence].append(run)
        levels.append(nodes)
    return Tree(levels, [join(path) for path in paths])


def cascade_plan(pooled: Pooled, tree: Tree, qo_lens: list[int]) -> Plan:
    starts = [0] * len(qo_lens)
    levels = []
    for nodes in tree.levels:
        rows = [sum(qo_lens[begin:end]) for begin, end, _ in nodes]
        first = [starts[begin] for begin, _, _ in nodes]
        levels.append(pooled.level([run for *_, run in nodes], rows, first, causal=True))
        for begin, end, run in nodes:
            for sequence in range(begin, end):
                starts[sequence] += run.num_keys
    return Plan(tuple(levels), positions(starts, qo_lens))


def run_one(pooled: Pooled, q, plan: Plan, scoring: Scoring, layer: int = 0) -> AttentionState:
    return pooled.backend.attend([Attend(layer, q, plan, scoring)]).result()[0]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_unequally_long_segments_see_their_own_keys(backend, rng, causal, layout) -> None:
    pooled = Pooled(backend(geometry(40, 4, layout, "fp16")), rng, "fp16")
    runs, qo_lens = [pooled.add(num_keys) for num_keys in (11, 3, 8)], [3, 3, 3]
    q, scoring = normal(rng, (9, HEADS, DIM), "fp16"), Scoring(0.125)
    want = expected(q, runs, qo_lens, causal, scoring)
    got = run_one(pooled, q, pooled.flat(runs, qo_lens, causal), scoring)
    check(got, want, bars(backend.kind, "fp16", "fp16"), (causal, layout))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_cascade_over_a_random_tree_equals_flat(
    backend, rng, depth, page_size, dtype, layout
) -> None:
    pooled = Pooled(backend(geometry(700, page_size, layout, dtype)), rng, "fp16")
    tree = grow(pooled, rng, sequences=7, depth=depth)
    qo_lens = [1, 3, 0, 1, 5, 1, 2]
    q = normal(rng, (sum(qo_lens), HEADS, DIM), "fp16")
    for scoring in (Scoring(0.125), Scoring(0.125, 6.0, 9)):
        want = expected(q, tree.whole, qo_lens, True, scoring)
        bar = bars(backend.kind, "fp16", dtype)
        plan = cascade_plan(pooled, tree, qo_lens)
        flat = pooled.flat(tree.whole, qo_lens, causal=True)
        case = (depth, page_size, dtype, layout, scoring)
        check(run_one(pooled, q, plan, scoring), want, bar, ("cascade", *case))
        check(run_one(pooled, q, flat, scoring), want, bar, ("flat", *case))


def test_rows_may_be_planned_in_another_order_than_the_request_holds_them(backend, rng) -> None:
    pooled = Pooled(backend(geometry(200)), rng, "fp16")
    runs = [pooled.add(n) for n in (13, 0, 40, 5)]
    q = normal(rng, (4, HEADS, DIM), "fp16")
    order = int32([2, 0, 3, 1])
    flat = pooled.flat([runs[i] for i in order], [1] * 4, causal=True)
    got = run_one(pooled, q, Plan(flat.levels, flat.positions, order), Scoring(0.125))
    want = expected(q, runs, [1] * 4, True, Scoring(0.125))
    check(got, want, bars(backend.kind, "fp16", "fp16"))


def test_eight_requests_in_three_levels_as_in_the_documented_figure(backend, rng) -> None:
    """One root, three nodes under it, eight leaves; every array spelled out, pages of 4.

    The root holds 8 tokens, the nodes 4, 8 and 4, and request i has i of its own.
    """
    pooled = Pooled(backend(geometry(16)), rng, "fp16")
    pooled.free = list(range(15, -1, -1))
    root = pooled.add(8)
    nodes = [pooled.add(4), pooled.add(8), pooled.add(4)]
    leaves = [pooled.add(i) for i in range(8)]
    qo_indptr = [[0, 8], [0, 3, 5, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    kv_indptr = [[0, 2], [0, 1, 3, 4], [0, 0, 1, 2, 3, 4, 6, 8, 10]]
    kv_indices = [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]
    kv_last_page_len = [[4], [4, 4, 4], [0, 1, 2, 3, 4, 1, 2, 3]]
    kv_start = [[0], [8, 8, 8], [12, 12, 12, 16, 16, 12, 12, 12]]
    arrays = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_start)
    levels = tuple(Level(*map(int32, level), causal=False) for level in zip(*arrays, strict=True))
    plan = Plan(levels, int32([11, 12, 13, 18, 19, 16, 17, 18]))
    parents = [nodes[0]] * 3 + [nodes[1]] * 2 + [nodes[2]] * 3
    whole = [join([root, *pair]) for pair in zip(parents, leaves, strict=True)]
    q = normal(rng, (8, HEADS, DIM), "fp16")
    want = expected(q, whole, [1] * 8, False, Scoring(0.125))
    check(run_one(pooled, q, plan, Scoring(0.125)), want, bars(backend.kind, "fp16", "fp16"))


def test_a_shared_prefix_in_its_three_steps_is_the_whole_attention(backend, rng) -> None:
    """Attend the prefix for all, attend each one's own, merge the two states."""
    pooled = Pooled(backend(geometry(200)), rng, "fp16")
    prefix, own = pooled.add(64), [pooled.add(n) for n in (1, 17, 0, 30)]
    q = normal(rng, (4, HEADS, DIM), "fp16")
    shared = Plan((pooled.level([prefix], [4], [0], False),), int32([0] * 4))
    steps = [
        run_one(pooled, q, shared, Scoring(0.125)),
        run_one(pooled, q, pooled.flat(own, [1] * 4, False), Scoring(0.125)),
    ]
    o = np.stack([step.o for step in steps], 1).reshape(-1, HEADS, DIM)
    lse = np.stack([step.lse for step in steps], 1).reshape(-1, HEADS)
    got = pooled.backend.merge(o, lse, int32([0, 2, 4, 6, 8])).result()
    want = expected(q, [join([prefix, run]) for run in own], [1] * 4, False, Scoring(0.125))
    bar = bars(backend.kind, "fp16", "fp16")
    check(got, want, type(bar)(2 * bar.o, bar.lse, bar.ulp))  # o was rounded once more on the way


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_a_split_sequence_merges_to_the_unsplit_one(backend, rng, pieces) -> None:
    pooled = Pooled(backend(geometry(200)), rng, "fp16")
    runs = [pooled.add(n) for n in rng.integers(0, 12, pieces) * 4]
    q = normal(rng, (2, HEADS, DIM), "fp16")
    parts = []
    for run in runs:
        plan = pooled.flat([run], [2], causal=False)
        state = run_one(pooled, q, plan, Scoring(0.125))
        parts.append((state.o, state.lse))
    want = expected(q, [join(runs)], [2], False, Scoring(0.125))
    merged = oracle.merge(parts)
    got = AttentionState(merged[0].astype(np.float16), merged[1].astype(np.float32))
    bar = bars(backend.kind, "fp16", "fp16")
    check(got, want, type(bar)(2 * bar.o, bar.lse, bar.ulp))


def test_batched_equals_single(backend, rng) -> None:
    pooled = Pooled(backend(geometry(900, page_size=5)), rng, "bf16")
    runs = [pooled.add(n) for n in (0, 1, 4, 5, 6, 54, 97, 600, 97, 54, 600)]
    q = normal(rng, (len(runs), HEADS, DIM), "bf16")
    together = run_one(pooled, q, pooled.flat(runs, [1] * len(runs), True), Scoring(0.125))
    for row, run in enumerate(runs):
        one = q[row : row + 1]
        alone = run_one(pooled, one, pooled.flat([run], [1], True), Scoring(0.125))
        want = alone.o.astype(np.float64), alone.lse.astype(np.float64)
        got = AttentionState(together.o[row : row + 1], together.lse[row : row + 1])
        check(got, want, bars(backend.kind, "bf16", "fp16"), f"{run.num_keys} keys")


def test_requests_of_several_layers_together_equal_each_alone(backend, rng) -> None:
    pooled = Pooled(backend(geometry(900, layers=3)), rng, "fp16")
    requests, wants = [], []
    for layer, kv_lens, qo_lens in [(2, (9, 30), (1, 1)), (0, (70,), (37,)), (2, (0, 5), (2, 0))]:
        runs = [pooled.add(n, layer) for n in kv_lens]
        q = normal(rng, (sum(qo_lens), HEADS, DIM), "fp16")
        plan = pooled.flat(runs, qo_lens, causal=True)
        requests.append(Attend(layer, q, plan, Scoring(0.125, 0.0, 20)))
        wants.append(expected(q, runs, qo_lens, True, Scoring(0.125, 0.0, 20)))
    together = pooled.backend.attend(requests).result()
    for number, (got, want, request) in enumerate(zip(together, wants, requests, strict=True)):
        bar = bars(backend.kind, "fp16", "fp16")
        check(got, want, bar, f"request {number} of 3")
        check(pooled.backend.attend([request]).result()[0], want, bar, f"request {number} alone")


def test_a_masked_request_beside_an_unmasked_one_keeps_its_mask_to_itself(backend, rng) -> None:
    pooled = Pooled(backend(geometry(100)), rng, "fp16")
    runs = [pooled.add(21), pooled.add(21), pooled.add(6)]
    q = [normal(rng, (5, HEADS, DIM), "fp16") for _ in runs]
    masks = [None, rng.random((5, 21)) < 0.5, rng.random((5, 6)) < 0.5]
    requests = [
        Attend(
            0,
            q[i],
            pooled.flat([runs[i]], [5], False),
            Scoring(0.125),
            None if mask is None else make_mask(mask, [5], [runs[i].num_keys]),
        )
        for i, mask in enumerate(masks)
    ]
    for i, got in enumerate(pooled.backend.attend(requests).result()):
        own = None if masks[i] is None else [masks[i]]
        want = expected(q[i], [runs[i]], [5], False, Scoring(0.125), own)
        check(got, want, bars(backend.kind, "fp16", "fp16"), f"request {i}")


def test_no_requests_and_no_rows_are_legal(backend, rng) -> None:
    pooled = Pooled(backend(geometry(10)), rng, "fp16")
    assert pooled.backend.attend([]).result() == []
    q = normal(rng, (0, HEADS, DIM), "fp16")
    got = run_one(pooled, q, pooled.flat([pooled.add(5)], [0], True), Scoring(0.125))
    assert got.o.shape == (0, HEADS, DIM)
    assert got.lse.shape == (0, HEADS)
