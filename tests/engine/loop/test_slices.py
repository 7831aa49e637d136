"""Attention cut into pieces has the numbers of the whole; pieces are about as long as a slice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest

from kernels import make_backend
from kernels.backend import Attend, AttentionState, Backend, PoolGeometry, RaggedAttend, Scoring
from kernels.tensor import host_array
from service.core.plans.plan import make_plan
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.handlers.attention import paged_cost, ragged_mask
from service.engine.handlers.slices import (
    RowSpan,
    cut_attend,
    even_spans,
    paced_spans,
    ragged_keys,
    row_keys,
    shared_keys,
)
from service.engine.store.plan_cache import PlanCache, Planned
from service.engine.work.pace import DevicePace
from service.engine.work.work import Cost

GEOMETRY = PoolGeometry(1, 256, 4, 2, 8, dtype="fp32")
Rng = np.random.Generator
ROUNDS = 12


@dataclass
class Forest:
    """Random sequences with shared prefixes, written into a poisoned pool."""

    backend: Backend
    tree: PrefixTree
    ids: list[str]

    def lengths(self) -> Any:
        return self.tree.lengths(self.ids, 0)


def forest(rng: Rng) -> Forest:
    tree = PrefixTree(GEOMETRY.num_pages, GEOMETRY.page_size, 1)
    backend = make_backend("cpu", GEOMETRY, poison=True)
    names: list[str] = []
    for at in range(int(rng.integers(2, 9))):
        parent = str(rng.choice(names)) if names and rng.random() < 0.7 else None
        copies = tree.create([NewSpec(f"s{at}", parent)])
        backend.copy_rows(copies.src_pages, copies.dst_pages, copies.num_rows)
        names.append(f"s{at}")
        count = np.array([rng.integers(0, 14)], np.int32)
        extension = tree.extend(0, names[-1:], count)
        k, v = rng.standard_normal((2, int(count[0]), 2, 8)).astype(np.float32)
        backend.append(0, k, v, extension.slots)
    chosen = rng.permutation(names)[: rng.integers(1, len(names) + 1)].tolist()
    return Forest(backend, tree, chosen)


def indptr(lens: Any) -> Any:
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)


def any_attend(rng: Rng, made: Forest) -> tuple[Attend, Planned, Any]:
    """Attention with random levels, order, causality, window and mask; its rows per sequence."""
    lens = rng.integers(0, 6, len(made.ids))
    qo_indptr, n = indptr(lens), int(lens.sum())
    mode = rng.choice(["always", "never"])
    causal = bool(rng.random() < 0.5)
    planned = PlanCache(made.tree).sequences(made.ids, 0, qo_indptr, causal, mode)
    mask = None
    if rng.random() < 0.5:
        bits = rng.random(int((lens * made.lengths()).sum())) < 0.6
        mask = ragged_mask(bits, False, qo_indptr, made.lengths(), planned.plan.order)
    scoring = Scoring(0.3, float(rng.choice([0.0, 5.0])), int(rng.choice([-1, 0, 3])))
    q = rng.standard_normal((n, 4, 8)).astype(np.float32)
    return Attend(0, q, planned.plan, scoring, mask, empty_state(q)), planned, lens


def empty_state(q: Any) -> AttentionState:
    return AttentionState(np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32))


def in_pieces(backend: Backend, whole: Attend, spans: list[RowSpan]) -> AttentionState:
    """The answer of `whole`, piece by piece."""
    out = empty_state(whole.q)
    for span in spans:
        piece, rows = cut_attend(replace(whole, out=out), span)
        state = backend.attend([piece]).result()[0]
        if piece.out is None:
            host_array(out.o)[rows] = host_array(state.o)
            host_array(out.lse)[rows] = host_array(state.lse)
    return out


def same(one: AttentionState, other: AttentionState, case: str) -> None:
    for name in ("o", "lse"):
        wanted = getattr(other, name)
        np.testing.assert_allclose(
            getattr(one, name), wanted, atol=2e-6, rtol=2e-6, err_msg=f"{name}: {case}"
        )


def random_spans(rng: Rng, n: int) -> list[RowSpan]:
    """Runs that cover rows 0 to n."""
    cuts = np.unique(np.concatenate(([0], rng.integers(0, n + 1, 4), [n]))).tolist()
    if len(cuts) == 1:
        return [RowSpan(0, 0, Cost())]
    return [RowSpan(a, b, Cost()) for a, b in pairwise(cuts)]


@pytest.mark.parametrize(("slice_s", "keys"), [(1e9, 3 * 3 * 4), (1e-9, 7 + 8 + 9)])
def test_attention_costs_the_keys_of_each_row_where_a_bound_of_them_is_long(
    slice_s: float, keys: int
) -> None:
    tree = PrefixTree(GEOMETRY.num_pages, GEOMETRY.page_size, 1)
    tree.create([NewSpec("a")])
    tree.extend(0, ["a"], np.array([9], np.int32))
    planned = PlanCache(tree).sequences(["a"], 0, indptr([3]), True, "never")
    store: Any = SimpleNamespace(geometry=GEOMETRY, pace=DevicePace(1.0, 1.0, slice_s))
    q = np.zeros((3, 4, 8), np.float32)
    moved = 9.0 * GEOMETRY.token_bytes + 2.0 * q.nbytes
    assert paged_cost(store, q, planned, -1, 0) == Cost(moved, 4.0 * 4 * 8 * keys)


def test_pieces_of_attention_over_pages_have_the_numbers_of_the_whole(rng: Rng) -> None:
    for _ in range(ROUNDS):
        made = forest(rng)
        whole, *_ = any_attend(rng, made)
        wanted = made.backend.attend([whole]).result()[0]
        n = whole.plan.positions.size
        spans = random_spans(rng, n)
        same(in_pieces(made.backend, whole, spans), wanted, f"{spans}")
        one_by_one = [RowSpan(at, at + 1, Cost()) for at in range(n)]
        same(in_pieces(made.backend, whole, one_by_one), wanted, "row by row")


def test_pieces_of_explicit_levels_have_the_numbers_of_the_whole(rng: Rng) -> None:
    for _ in range(ROUNDS):
        made = forest(rng)
        n = int(rng.integers(1, 9))
        apart = [name for name in made.tree.books if name.parent is None and name.start == 0]
        ids = [leaf.id for leaf in apart] or made.ids[:1]
        levels = []
        for name in ids[:3]:
            bounds = np.sort(rng.integers(0, n + 1, 2)).astype(np.int32)
            levels.append(((name,), bounds))
        planned = PlanCache(made.tree).levels(levels, 0, bool(rng.random() < 0.5), n)
        q = rng.standard_normal((n, 4, 8)).astype(np.float32)
        whole = Attend(0, q, planned.plan, Scoring(0.3), None, empty_state(q))
        wanted = made.backend.attend([whole]).result()[0]
        same(in_pieces(made.backend, whole, random_spans(rng, n)), wanted, f"{levels}")


def test_pieces_of_attention_equal_the_oracle(rng: Rng) -> None:
    for causal, window in ((False, -1), (True, -1), (True, 2), (False, 3)):
        tree = PrefixTree(GEOMETRY.num_pages, GEOMETRY.page_size, 1)
        backend = make_backend("cpu", GEOMETRY, poison=True)
        ids, kv_lens, lens = ["a", "b", "c"], np.array([9, 0, 13], np.int32), [4, 2, 6]
        tree.create([NewSpec(name) for name in ids])
        k, v = rng.standard_normal((2, 22, 2, 8)).astype(np.float32)
        backend.append(0, k, v, tree.extend(0, ids, kv_lens).slots)
        planned = PlanCache(tree).sequences(ids, 0, indptr(lens), causal, "never")
        q = rng.standard_normal((12, 4, 8)).astype(np.float32)
        whole = Attend(0, q, planned.plan, Scoring(0.3, 0.0, window))
        out = in_pieces(backend, whole, random_spans(rng, 12))
        at, kv_at = indptr(lens), indptr(kv_lens)
        for b in range(3):
            mine, keys = slice(at[b], at[b + 1]), slice(kv_at[b], kv_at[b + 1])
            seen = oracle.visible(lens[b], int(kv_lens[b]), causal=causal, window_left=window)
            o, lse = oracle.attend(q[mine], k[keys], v[keys], seen, sm_scale=0.3)
            np.testing.assert_allclose(host_array(out.o)[mine], o, atol=1e-5)
            np.testing.assert_allclose(host_array(out.lse)[mine], lse, atol=1e-5)


def any_ragged(rng: Rng) -> RaggedAttend:
    batch = int(rng.integers(1, 6))
    lens, kv_lens = rng.integers(0, 7, batch), rng.integers(0, 9, batch)
    q = rng.standard_normal((int(lens.sum()), 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, int(kv_lens.sum()), 2, 8)).astype(np.float32)
    mask = None
    if rng.random() < 0.5:
        bits = rng.random(int((lens * kv_lens).sum())) < 0.6
        mask = ragged_mask(bits, False, indptr(lens), kv_lens.astype(np.int32), None)
    return RaggedAttend(
        q=q,
        k=k,
        v=v,
        qo_indptr=indptr(lens),
        kv_indptr=indptr(kv_lens),
        causal=bool(rng.random() < 0.5),
        scoring=Scoring(0.3, 0.0, int(rng.choice([-1, 0, 3]))),
        mask=mask,
        out=empty_state(q),
    )


def test_the_keys_of_rows_equal_the_oracles(rng: Rng) -> None:
    for _ in range(ROUNDS):
        made = forest(rng)
        whole, planned, lens = any_attend(rng, made)
        keys = row_keys(whole.plan, GEOMETRY.page_size, whole.scoring.window_left)
        assert keys.max(initial=0) <= planned.max_keys
        causal = any(level.causal for level in whole.plan.levels)
        how = {"causal": causal, "window_left": whole.scoring.window_left}
        wanted: list[int] = []
        for count, held in zip(lens.tolist(), made.lengths().tolist(), strict=True):
            wanted += oracle.visible(count, held, **how).sum(axis=1).tolist()
        order = slice(None) if whole.plan.order is None else whole.plan.order
        np.testing.assert_array_equal(keys, np.array(wanted, int)[order], f"{how}")


def test_the_keys_of_ragged_rows_equal_the_oracles(rng: Rng) -> None:
    for _ in range(ROUNDS):
        whole = any_ragged(rng)
        wanted: list[int] = []
        for lens, kv_lens in zip(np.diff(whole.qo_indptr), np.diff(whole.kv_indptr), strict=True):
            how = {"causal": whole.causal, "window_left": whole.scoring.window_left}
            wanted += oracle.visible(int(lens), int(kv_lens), **how).sum(axis=1).tolist()
        keys = ragged_keys(whole)
        assert keys.tolist() == wanted


def test_spans_cover_every_row_once_in_order_and_share_the_cost(rng: Rng) -> None:
    cost = Cost(1e6, 3e6)
    for _ in range(20 * ROUNDS):
        rows, number = int(rng.integers(0, 40)), int(rng.integers(1, 60))
        spans = even_spans(rows, cost, number)
        assert 1 <= len(spans) <= max(number, 1), (rows, number)
        covered = [row for span in spans for row in range(span.first, span.last)]
        assert covered == list(range(rows)), (rows, number)
        assert rows == 0 or all(span.last > span.first for span in spans)
        assert sum(span.cost.flops for span in spans) == pytest.approx(cost.flops)
        assert sum(span.cost.num_bytes for span in spans) == pytest.approx(cost.num_bytes)


# DevicePace.


def test_work_is_cut_into_slices_of_about_the_length_asked_for() -> None:
    pace = DevicePace(1e9, 1e12, slice_s=0.02)
    assert pace.num_slices("append", Cost(1e6)) == 1
    assert pace.num_slices("append", Cost(2e8)) == 10
    # What every piece pays again is part of its length, but at most half of it.
    assert pace.num_slices("attend", Cost(2.05e8), Cost(5e6)) == pytest.approx(14, abs=1)
    assert pace.num_slices("attend", Cost(1e9), Cost(3e7)) == pytest.approx(33, abs=1)
    assert pace.num_slices("attend", Cost(1e9), Cost(1e8)) == pytest.approx(23, abs=1)


@pytest.mark.parametrize("slowdown", [1.0, 10.0, 100.0])
def test_a_slice_that_took_far_too_long_halves_the_next(slowdown: float) -> None:
    """Whatever the estimate: the host may be slow just now, and learn from other work."""
    pace, rows, spans = DevicePace(1e9, 1e12, slice_s=0.02), 100_000, []
    for span in paced_spans(pace, "attend", rows, Cost(1e9)):
        pace.correct("attend", span.cost, 1e-9 * span.cost.num_bytes * slowdown)
        pace._steady.clear()  # cuts follow an estimate that stays wrong
        spans.append(span.last - span.first)
    assert sum(spans) == rows
    whole = spans[0]
    parts = [span / whole for span in spans[:-1]]
    assert whole == pytest.approx(2000, rel=0.03)
    if slowdown == 1.0:
        assert min(parts) > 0.9
    else:
        assert parts[:4] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8], rel=0.05)
        assert min(parts) > 0.1, "what every slice reads again is not paid without end"


def test_every_slice_counts_what_it_reads_again() -> None:
    """Else the rows of each seem the slower, the fewer they are, until each has one."""
    pace, rows, fixed = DevicePace(4e9, 2e10, slice_s=0.02), 400, Cost(2e6)
    for _ in range(20):
        num = 0
        for span in paced_spans(pace, "attend", rows, Cost(2.1e6, 1.6e9), fixed):
            num += 1
            spent = 0.01 + 0.1 * (span.last - span.first) / rows  # a slow read, then the rows
            pace.correct("attend", span.cost, spent)
    assert num <= 20
    own = sum(s.cost.num_bytes - 2e6 for s in paced_spans(pace, "attend", rows, Cost(3e6), fixed))
    assert own == pytest.approx(1e6)


def test_rows_with_keys_of_their_own_read_nothing_again() -> None:
    """As in a flat decode."""
    tree = PrefixTree(GEOMETRY.num_pages, GEOMETRY.page_size, 1)
    tree.create([NewSpec("a")])
    tree.extend(0, ["a"], np.array([20], np.int32))
    tree.create([NewSpec("b", "a")])
    tree.extend(0, ["a", "b"], np.ones(2, np.int32))
    one_each = np.arange(3, dtype=np.int32)
    for mode, keys in (("never", 0), ("always", 20)):
        plan = make_plan(tree, ["a", "b"], 0, one_each, True, mode)
        assert shared_keys(plan, GEOMETRY.page_size) == keys, mode


@pytest.mark.parametrize("factor", [0.02, 1.0, 50.0])
def test_estimates_approach_measurements_from_any_first_guess(factor: float) -> None:
    pace, cost = DevicePace(1e9, 1e12, slice_s=0.02), Cost(5e7)
    for _ in range(60):
        pace.correct("attend", cost, 0.05 * factor)
    assert pace.seconds("attend", cost) == pytest.approx(0.05 * factor, rel=0.1)
    assert pace.seconds("append", cost) == pytest.approx(0.05), "each kind has its own rate"


@pytest.mark.parametrize("measured", [Cost(6e7, 1e5), Cost(1e5, 3e8)], ids=["bytes", "flops"])
def test_work_that_only_moves_bytes_says_nothing_about_flops_nor_the_other_way_round(
    measured: Cost,
) -> None:
    """4,096 short decodes in an eighth of the guess must not make a prefill's slices 8 times as
    long: others would wait for the first."""
    pace, guess = DevicePace(4e9, 2e10, slice_s=0.02), 0.015
    other = Cost(4e7, 0.0) if measured.flops > measured.num_bytes else Cost(0.0, 2e8)
    for _ in range(200):
        pace.correct("attend", measured, guess / 8)
    assert pace.seconds("attend", measured) == pytest.approx(guess / 8, rel=0.1)
    assert pace.seconds("attend", other, True) == pytest.approx(0.01, rel=0.1)
    mixed = Cost(4e7, 2e8)
    for _ in range(60):
        pace.correct("attend", mixed, 0.03)
    assert pace.seconds("attend", mixed) == pytest.approx(0.03, rel=0.1), "both rates change"


def test_work_measured_at_no_time_leaves_an_estimate() -> None:
    pace = DevicePace(1e9, 1e12, 0.01)
    for _ in range(3000):
        pace.correct("attend", Cost(num_bytes=1e8), 0.0)
    assert pace.seconds("attend", Cost(num_bytes=1e8)) > 0


@pytest.mark.parametrize("cost", [Cost(1e4, 2e4), Cost(4e6, 1e6)], ids=["tiny", "small"])
def test_what_small_calls_cost_does_not_cut_large_work_to_shreds(cost: Cost) -> None:
    pace = DevicePace(4e9, 2e10, slice_s=0.02)
    for _ in range(1000):  # milliseconds of calls for some microseconds of work
        pace.correct("attend", cost, 0.005)
    large = Cost(4e8, 2e9)
    assert pace.num_slices("attend", large) <= 50, "0.2 s of work at 20 ms a slice"


def test_a_launch_that_takes_a_whole_slice_is_learnt_from_however_short_it_was_thought() -> None:
    pace, cost = DevicePace(4e9, 2e10, slice_s=0.02), Cost(4e6, 1e6)
    for _ in range(20):
        pace.correct("attend", cost, 0.05)
    assert pace.is_long("attend", cost)


def test_a_rate_that_a_busy_host_has_spoiled_comes_back_whatever_the_pieces_are_then() -> None:
    pace, whole = DevicePace(4e9, 2e10, slice_s=0.02), Cost(4e8, 2e9)
    for _ in range(40):
        pace.correct("attend", Cost(4e6, 1e6), 0.05)
    assert pace.num_slices("attend", whole) > 100, "the estimate must be far too high"
    for _ in range(3):
        count = pace.num_slices("attend", whole)
        for _ in range(count):  # 0.2 s in all, and half a millisecond for each call
            piece = Cost(whole.num_bytes / count, whole.flops / count)
            pace.correct("attend", piece, 0.2 / count + 5e-4)
    assert pace.num_slices("attend", whole) <= 15, "0.2 s of work at 20 ms a slice"
