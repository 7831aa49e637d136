"""Rows of K and of V of two sizes, and latent rows, of which V is a part: dead slots poisoned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
from pairwise import cover, label
from pooled import (
    Bars,
    Pooled,
    Run,
    as_computed,
    bars,
    check,
    expected,
    indptr,
    int32,
    normal,
    positions,
    with_sinks,
)

from kernels.backend import (
    LEFT_OUT,
    NUMPY_DTYPES,
    Attend,
    LayerGroup,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
)
from kernels.masks import make_mask

PAIRS = ((192, 128), (128, 64), (64, 128), (72, 40), (256, 16))
UNEQUAL = cover(
    qo_len=(1, 3, 17, 90),
    kv_len=(0, 1, 16, 97, 300),
    dims=PAIRS,
    heads=((4, 4), (16, 2), (7, 1)),
    page_size=(5, 8, 16),
    layout=("NHD", "HND"),
    dtype=("fp16", "bf16"),
    causal=(True, False),
    window=(-1, 0, 20),
    cap=(0, 8.0),
    masked=(True, False),
)
LATENT = cover(
    qo_len=(1, 3, 9),
    kv_len=(0, 1, 63, 64, 65, 127, 129, 500),
    heads=(1, 5, 16, 40, 128),
    page_size=(5, 8, 16, 64),
    dtype=("fp16", "bf16"),
    causal=(True, False),
    window=(-1, 0, 70),
    cap=(0, 8.0),
    masked=(True, False),
    sinks=(True, False),
)
LATENT_SCALE = 192**-0.5


def unequal(case, num_pages: int) -> PoolGeometry:
    dims, dtype = case["dims"], case["dtype"]
    group = LayerGroup((0, 1), case["heads"][1], *dims, case["page_size"], dtype)
    return PoolGeometry.of_groups((group,), num_pages, case["layout"])


def latent(page_size: int, dtype, num_pages: int, dims=(576, 512)) -> PoolGeometry:
    group = LayerGroup((0, 1), 1, *dims, page_size, dtype, None, "latent")
    return PoolGeometry.of_groups((group,), num_pages)


def pages_for(lengths, page_size: int) -> int:
    return sum(-(-n // page_size) for n in lengths) + 3


def attended(pooled, rng, case, heads, scale, qo_lens, kv_lens, sinks=None):
    """o and lse of a flat batch, checked against the oracle."""
    layer, kind = 1, pooled.backend.name
    runs = [pooled.add(n, layer) for n in kv_lens]
    group = pooled.backend.geometry.group_of(layer)
    masks = None
    if case["masked"]:
        masks = [rng.random((qo, kv)) < 0.6 for qo, kv in zip(qo_lens, kv_lens, strict=True)]
    mask = masks and make_mask(np.concatenate([m.ravel() for m in masks]), qo_lens, kv_lens)
    q = normal(rng, (sum(qo_lens), heads, group.head_dim), group.dtype)
    scoring = Scoring(scale, case["cap"], case["window"])
    plan = pooled.flat(runs, qo_lens, case["causal"], layer)
    got = pooled.backend.attend([Attend(layer, q, plan, scoring, mask, None, sinks)]).result()[0]
    want = expected(q, runs, qo_lens, case["causal"], scoring, masks)
    check(got, with_sinks(want, sinks), bars(kind, group.dtype, group.dtype), case)


@pytest.mark.parametrize("case", UNEQUAL, ids=label)
def test_keys_and_values_of_two_sizes_are_within_the_bar(backend, rng, case) -> None:
    qo_lens, kv_lens = [case["qo_len"], 0, 3, 2], [case["kv_len"], 9, 0, 40]
    shape = unequal(case, pages_for(kv_lens, case["page_size"]))
    pooled = Pooled(backend(shape), rng, case["dtype"])
    scale = case["dims"][0] ** -0.5
    attended(pooled, rng, case, case["heads"][0], scale, qo_lens, kv_lens)


@pytest.mark.parametrize("case", UNEQUAL[::2], ids=label)
def test_ragged_keys_and_values_of_two_sizes_are_within_the_bar(backend, rng, case) -> None:
    qo_lens, kv_lens = [case["qo_len"], 0, 3, 2], [case["kv_len"], 9, 0, 40]
    (heads, kv_heads), dims, dtype = case["heads"], case["dims"], case["dtype"]
    maker = backend(PoolGeometry(1, 4, 16, 2, 64, "NHD", "fp16"))
    q = normal(rng, (sum(qo_lens), heads, dims[0]), dtype)
    k, v = (normal(rng, (sum(kv_lens), kv_heads, dim), dtype) for dim in dims)
    ends, none = indptr(kv_lens), np.zeros(0, np.int32)
    runs = [Run(none, k[a:b].astype(float), v[a:b].astype(float)) for a, b in pairwise(ends)]
    scoring = Scoring(dims[0] ** -0.5, case["cap"], case["window"])
    request = RaggedAttend(q, k, v, indptr(qo_lens), ends, case["causal"], scoring)
    want = expected(q, runs, qo_lens, case["causal"], scoring)
    check(maker.attend_ragged(request).result(), want, bars(backend.kind, dtype, dtype), case)


@pytest.mark.parametrize("case", LATENT, ids=label)
def test_latent_rows_are_within_the_bar(backend, rng, case) -> None:
    qo_lens, kv_lens = [case["qo_len"], 0, 2, 1], [case["kv_len"], 9, 0, 140]
    shape = latent(case["page_size"], case["dtype"], pages_for(kv_lens, case["page_size"]))
    pooled = Pooled(backend(shape), rng, case["dtype"])
    sinks = normal(rng, (case["heads"],), "fp32") if case["sinks"] else None
    attended(pooled, rng, case, case["heads"], LATENT_SCALE, qo_lens, kv_lens, sinks)


@pytest.mark.parametrize("dims", [(96, 64), (40, 32), (320, 256)])
def test_latent_rows_of_other_sizes_are_within_the_bar(backend, rng, dims) -> None:
    case = {"masked": False, "cap": 0.0, "window": -1, "causal": True}
    pooled = Pooled(backend(latent(16, "fp16", 64, dims)), rng, "fp16")
    attended(pooled, rng, case, 8, dims[0] ** -0.5, [1, 4, 2], [200, 33, 2])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_latent_scores_that_rise_and_fall_along_a_sequence(backend, rng, dtype) -> None:
    """References move in either half of a pair of tiles, and rows of a tile apart."""
    lengths = [1000, 130, 700, 1]
    pool = backend(latent(16, dtype, pages_for(lengths, 16)))
    pooled = Pooled(pool, rng, dtype)
    slopes = (0.5, -0.5, 0.0, 1.0)
    runs = [
        pooled.add(n, 0, (slope * np.arange(n)).astype(NUMPY_DTYPES[dtype]))
        for n, slope in zip(lengths, slopes, strict=True)
    ]
    q = normal(rng, (4, 16, 576), dtype).copy()
    q[:, :, 0] = np.linspace(-1, 1, 16)
    scoring = Scoring(LATENT_SCALE)
    got = pool.attend([Attend(0, q, pooled.flat(runs, [1] * 4, True), scoring)]).result()[0]
    want = expected(q, runs, [1] * 4, True, scoring)
    plain = bars(backend.kind, dtype, dtype)
    check(got, want, Bars(4 * plain.o, plain.lse, plain.ulp))  # few keys have all the weight


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_levels_are_merged(backend, rng, numerics, heads) -> None:
    """A shared prefix, branches of it, and each sequence's own keys; rows in another order."""
    pool = backend(latent(16, "bf16", 256), numerics=numerics)
    pooled = Pooled(pool, rng, "bf16")
    prefix, branches = pooled.add(320, 1), [pooled.add(48, 1) for _ in range(2)]
    own = [pooled.add(n, 1) for n in (3, 40, 200, 17, 1, 90)]
    count = len(own)
    levels = (
        pooled.level([prefix], [count], [0], False, 1),
        pooled.level(branches, [4, 2], [320] * 2, False, 1),
        pooled.level(own, [1] * count, [368] * count, False, 1),
    )
    parts = [(prefix, branches[i // 4], run) for i, run in enumerate(own)]
    whole = [
        Run(int32([]), *(np.concatenate([getattr(x, name) for x in these]) for name in "kv"))
        for these in parts
    ]
    order = int32(rng.permutation(count))
    plan = Plan(levels, positions([run.num_keys for run in whole], [1] * count), order)
    q = normal(rng, (count, heads, 576), "bf16")
    scoring = Scoring(LATENT_SCALE)
    got = pool.attend([Attend(1, q, plan, scoring)]).result()[0]
    o, lse = expected(q[order], whole, [1] * count, False, scoring)
    back = np.argsort(order)
    check(got, (o[back], lse[back]), bars(backend.kind, "bf16", "bf16"))


@pytest.mark.parametrize("shape", ["latent", "unequal"])
def test_invariant_bits_depend_on_a_row_and_its_keys_alone(backend, rng, shape) -> None:
    if shape == "latent":
        geometry, dim, heads = latent(16, "fp16", 1200), 576, 16
    else:
        case = {"dims": (192, 128), "dtype": "fp16", "heads": (16, 2), "page_size": 16}
        geometry, dim, heads = unequal(case | {"layout": "NHD"}, 1200), 192, 16
    pool = backend(geometry, numerics="invariant")
    pooled = Pooled(pool, rng, "fp16")
    split, scoring = pool.split_keys, Scoring(0.1)
    runs = [pooled.add(n) for n in (2 * split + 100, 77, split, 1, 300)]
    ones = [1] * len(runs)
    q = normal(rng, (len(runs), heads, dim), "fp16")
    together = pool.attend([Attend(0, q, pooled.flat(runs, ones, True), scoring)]).result()[0]
    for i, run in enumerate(runs):
        flat = pooled.flat([run], [1], True)
        alone = pool.attend([Attend(0, q[i : i + 1], flat, scoring)]).result()[0]
        assert alone.o.tobytes() == together.o[i : i + 1].tobytes(), i
        assert alone.lse.tobytes() == together.lse[i : i + 1].tobytes(), i
    at = split // 16
    first = Run(runs[0].pages[:at], runs[0].k[:split], runs[0].v[:split])
    rest = Run(runs[0].pages[at:], runs[0].k[split:], runs[0].v[split:])
    levels = (
        pooled.level([first], [1], [0], False),
        pooled.level([rest], [1], [split], True),
    )
    plan = Plan(levels, positions([runs[0].num_keys], [1]))
    cut = pool.attend([Attend(0, q[:1], plan, scoring)]).result()[0]
    assert cut.o.tobytes() == together.o[:1].tobytes()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", [(192, 128), (16, 64), (576, None)])
def test_rows_of_two_sizes_come_back_to_the_bit(backend, rng, dtype, layout, dims) -> None:
    if dims[1] is None:
        if dtype == "fp8_e4m3" and backend.kind == "cuda":
            pytest.skip("latents of fp8 are refused")
        group = LayerGroup((0, 1), 1, 576, 512, 16, dtype, None, "latent")
    else:
        group = LayerGroup((0, 1), 2, *dims, 16, dtype)
    pool = backend(PoolGeometry.of_groups((group,), 12, layout, (0.5, 2.0)))
    kind = NUMPY_DTYPES["fp16"]
    shapes = [(20, group.num_kv_heads, dim) for dim in group.stored_dims]
    k, v = ((rng.integers(-8, 8, shape) * 2).astype(kind) for shape in shapes)
    slots = int32(rng.permutation(12 * 16)[:20])
    slots[3] = LEFT_OUT
    pool.append(1, k, v, slots)
    there = slots != LEFT_OUT
    for got, want in zip(pool.gather(1, slots[there], "fp16").result(), (k, v), strict=True):
        assert got.tobytes() == want[there].tobytes()
    stored = NUMPY_DTYPES[dtype]
    out = tuple(np.zeros((19, *shape[1:]), stored) for shape in shapes)
    pool.read_stored(1, slots[there], (out[0], out[1])).result()
    others = int32(np.setdiff1d(np.arange(12 * 16), slots)[:19])
    pool.write_stored(0, out[0], out[1], others).result()
    for got, want in zip(pool.gather(0, others, "fp16").result(), (k, v), strict=True):
        assert got.tobytes() == want[there].tobytes()


def test_copied_rows_of_two_sizes_are_those_of_the_source(backend, rng) -> None:
    for group in (
        LayerGroup((0, 1), 2, 192, 128, 16, "fp16"),
        LayerGroup((0, 1), 1, 576, 512, 16, "fp16", None, "latent"),
    ):
        pool = backend(PoolGeometry.of_groups((group,), 6))
        shapes = [(16, group.num_kv_heads, dim) for dim in group.stored_dims]
        rows = [[normal(rng, shape, "fp16") for shape in shapes] for _ in range(2)]
        for layer in (0, 1):
            pool.append(layer, *rows[layer], int32(range(32, 48)))
        pool.copy_rows(int32([2, 2]), int32([4, 0]), int32([11, 16]))
        for layer in (0, 1):
            got = pool.gather(layer, int32(range(64, 75)), "fp16").result()
            whole = pool.gather(layer, int32(range(16)), "fp16").result()
            for part, copy, want in zip(got, whole, rows[layer], strict=True):
                assert part.tobytes() == want[:11].tobytes()
                assert copy.tobytes() == want.tobytes()


def test_rows_of_other_shapes_are_refused(backend, rng) -> None:
    pool = backend(latent(16, "fp16", 4))
    rows, none = normal(rng, (2, 1, 576), "fp16"), np.zeros((2, 1, 0), np.float16)
    slots = int32([0, 1])
    for k, v in ((rows[..., :512], none), (rows, rows[..., :512]), (rows[:1], none[:1])):
        with pytest.raises(ValueError, match="k, v"):
            pool.append(0, k, v, slots)


def test_a_prefill_over_new_keys_merges_with_absorbed_cached_latents(backend, rng) -> None:
    """The way to prefill a latent model in chunks: expanded K and V of new tokens, ragged, and the
    latents of cached ones, whose o is multiplied by W_UV before the merge."""
    heads, cached, new = 4, 90, 30
    pool = backend(latent(16, "fp16", 16))
    pooled = Pooled(pool, rng, "fp16")
    run = pooled.add(cached)
    up_k, up_v = (rng.standard_normal((heads, 512, 128)) * 512**-0.5 for _ in "kv")
    q_nope, q_rope = rng.standard_normal((new, heads, 128)), rng.standard_normal((new, heads, 64))
    absorbed = np.concatenate([np.einsum("nhd,hld->nhl", q_nope, up_k), q_rope], -1)
    fresh = normal(rng, (new, 1, 576), "fp16").astype(float)

    def expand(rows):
        c = rows[:, 0, :512]
        rope = np.broadcast_to(rows[:, 0, None, 512:], (len(rows), heads, 64))
        k = np.concatenate([np.einsum("nl,hld->nhd", c, up_k), rope], -1)
        return k, np.einsum("nl,hld->nhd", c, up_v)

    half = lambda x: x.astype(np.float16)  # noqa: E731
    q, (k, v) = np.concatenate([q_nope, q_rope], -1), expand(fresh)
    scoring = Scoring(LATENT_SCALE)
    whole = Plan((pooled.level([run], [new], [0], False),), int32(cached + np.arange(new)))
    old = pool.attend([Attend(0, half(absorbed), whole, scoring)]).result()[0]
    ends = indptr([new])
    own = pool.attend_ragged(RaggedAttend(half(q), half(k), half(v), ends, ends, True, scoring))
    own_state = own.result()
    expanded = half(np.einsum("nhl,hld->nhd", old.o.astype(float), up_v))
    o = np.stack([expanded, own_state.o], 1).reshape(2 * new, heads, 128)
    lse = np.stack([old.lse, own_state.lse], 1).reshape(2 * new, heads)
    got = pool.merge(o, lse, int32(2 * np.arange(new + 1))).result()
    all_k, all_v = (np.concatenate(x) for x in zip(expand(run.k), (k, v), strict=True))
    seen = np.arange(cached + new)[None] <= cached + np.arange(new)[:, None]
    want = oracle.attend(q, all_k, all_v, seen, sm_scale=LATENT_SCALE)
    plain = bars(backend.kind, "fp16", "fp16")
    check(got, want, Bars(4 * plain.o, 4 * plain.lse, 4 * plain.ulp))  # operands are rounded


def test_groups_of_latent_and_of_unequal_rows_share_pages(backend, rng) -> None:
    groups = (
        LayerGroup((0, 3), 1, 576, 512, 16, "bf16", None, "latent"),
        LayerGroup((1,), 2, 192, 128, 8, "fp16", window=40),
        LayerGroup((2, 4), 2, 64, 64, 16, "fp16", window=33),
    )
    pool = backend(PoolGeometry.of_groups(groups, 128))
    requests, wants = [], []
    for layer, dtype in enumerate(("bf16", "fp16", "fp16", "bf16", "fp16")):
        pooled = Pooled(pool, rng, dtype)
        pooled.free = rng.permutation(np.arange(20 * layer, 20 * layer + 20)).tolist()
        run, group = pooled.add(70, layer), pool.geometry.group_of(layer)
        q = normal(rng, (3, 8, group.head_dim), "fp16")
        scoring = Scoring(0.08)
        requests.append(Attend(layer, q, pooled.flat([run], [3], True, layer), scoring))
        rounded = as_computed(pool.name, q, "fp16", dtype)
        wants.append((expected(rounded, [run], [3], True, scoring), dtype))
    for state, (want, dtype) in zip(pool.attend(requests).result(), wants, strict=True):
        check(state, want, bars(pool.name, "fp16", dtype))
