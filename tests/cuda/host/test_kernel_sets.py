"""Which kernels a batch gets by its lengths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.cases.kernel_plans import pool_plan
from bench.report.provenance import workloads
from kernels.backend import DType, Level, Numerics, Plan, PoolGeometry, Scoring
from kernels.cuda.attention.choice import batch_kind, estimate, segments_of
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.kernel_sets import BatchKind, kernel_sets
from kernels.cuda.kv.pool import pool_view
from kernels.cuda.kv.ragged import ragged_view
from kernels.cuda.merge.variants import merge_launch
from kernels.cuda.plan.costs import H200
from kernels.cuda.plan.tiles import Splits
from kernels.cuda.specs import service_specs

MULTIPROCESSORS = 132


def config_of(
    dtype: DType = "fp16", head_dim: int = 128, page_size: int = 16, cap: float = 0.0
) -> AttentionConfig:
    geometry = PoolGeometry(1, 64, page_size, 8, head_dim, "NHD", dtype)
    pool = pool_view(geometry, geometry.groups[0], 0)
    return AttentionConfig(pool, 32, "fp16", Scoring(1.0, cap), False)


def plan_of(rows: list[int], keys: list[int]) -> Plan:
    pages = [-(-n // 16) for n in keys]
    bounds = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    level = Level(
        bounds,
        np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
        np.arange(sum(pages), dtype=np.int32),
        np.array([n - (p - 1) * 16 for n, p in zip(keys, pages, strict=True)], np.int32),
        np.zeros(len(keys), np.int32),
        True,
    )
    last = [np.zeros(0), *(np.arange(n - r, n) for r, n in zip(rows, keys, strict=True))]
    return Plan((level,), np.concatenate(last).astype(np.int32))


def kind_of(*plans: Plan, head_dim: int = 128) -> BatchKind:
    sets = kernel_sets(config_of(head_dim=head_dim).shape, "sm_90a", MULTIPROCESSORS)
    return batch_kind(plans, sets["usual"].planner, sets)


@pytest.mark.parametrize(
    ("rows", "keys", "kind"),
    [
        ([1] * 16, [128] * 16, "few fixed"),
        ([1] * 16, [128, 90] * 8, "few fixed"),
        ([1] * 16, [128, 60] * 8, "short decode"),
        ([1] * 16, [130] * 16, "short decode"),
        ([1] * 17, [128] * 17, "short decode"),
        ([1] * 64, [4096] * 64, "usual"),
        ([1] * 8, [1024, 17, *[600] * 6], "short decode"),
        ([1, 1, 2], [128] * 3, "few fixed"),
        ([100, 30, 500], [100, 400, 500], "short prefill"),
        ([100, 30, 500], [100, 30, 520], "usual"),
        ([100, 3, 500], [100, 400, 500], "pair fixed"),
        ([60] * 4, [3000] * 4, "wide fixed"),
        ([512, 512], [1000, 1100], "usual"),
    ],
)
def test_a_batch_is_reported_by_its_rows_and_keys(
    rows: list[int], keys: list[int], kind: BatchKind
) -> None:
    assert kind_of(plan_of(rows, keys)) == kind


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "kind"),
    [
        ("cascade/96x(3k+4x1k+192)", 8, 128, "usual"),
        ("cascade/512x(800+96)", 8, 128, "usual"),
        ("cascade/16x(2k+128)", 8, 128, "pair whole"),
        ("cascade/8x16x(6k+128)", 8, 128, "pair fixed"),
        ("decode/64x8k-mqa", 1, 128, "pair whole"),
        ("decode/64x4k", 3, 256, "few fixed"),
        ("decode/16x128", 3, 256, "few fixed"),
        ("decode/16x128", 2, 256, "few fixed"),
        ("decode/64x4k", 2, 256, "few fixed"),
        ("cascade/16x(2k+128)", 8, 256, "few whole"),
        ("cascade/8x16x(6k+128)", 8, 192, "usual"),
        ("cascade/16x8x(2k+256)", 4, 192, "few fixed"),
        ("cascade/16x8x(2k+256)", 2, 192, "few fixed"),
    ],
)
def test_one_kernel_takes_few_rows_and_many_where_that_is_measured_to_be_faster(
    name: str, heads: int, head_dim: int, kind: BatchKind
) -> None:
    """Of as many kv heads; where these are 3, for 30 query heads, groups have 10 rows."""
    (row,) = (row for row in workloads() if row["name"] == name)
    _, plan = pool_plan(row)
    shape = config_of(head_dim=head_dim).shape
    queries = 30 if heads == 3 else row["num_qo_heads"]
    page_bytes = shape.page_bytes // shape.num_kv_heads * heads
    shape = shape._replace(num_kv_heads=heads, num_qo_heads=queries, page_bytes=page_bytes)
    sets = kernel_sets(shape, "sm_90a", MULTIPROCESSORS)
    assert batch_kind([plan], sets["usual"].planner, sets) == kind


def test_windows_have_the_usual_kernels() -> None:
    (row,) = (row for row in workloads() if row["name"] == "cascade/16x(2k+128)")
    shape = config_of().shape._replace(scoring=Scoring(1.0, window_left=100))
    sets = kernel_sets(shape, "sm_90a", MULTIPROCESSORS)
    assert batch_kind([pool_plan(row)[1]], sets["usual"].planner, sets) == "usual"


def test_an_estimate_grows_with_its_batch_and_stops_above_the_best_one_so_far() -> None:
    sets = kernel_sets(config_of().shape, "sm_90a", MULTIPROCESSORS)
    for one in sets.values():
        ends = [
            estimate(one, segments_of([plan_of([60] * n, [keys] * n)], one.planner), H200.sets)
            for n, keys in ((1, 200), (1, 3000), (8, 3000), (64, 3000))
        ]
        assert ends == sorted(ends)
        batch = segments_of([plan_of([60] * 64, [3000] * 64)], one.planner)
        stopped = estimate(one, batch, H200.sets, soonest=ends[2])
        assert ends[2] < stopped <= ends[3]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_a_plan_without_sequences_does_not_count(numerics: Numerics) -> None:
    sets = kernel_sets(
        config_of().shape, "sm_90a", MULTIPROCESSORS, 2048 * (numerics == "invariant")
    )
    some, planner = plan_of([512], [1000]), sets["usual"].planner
    assert batch_kind([plan_of([], []), some], planner, sets) == batch_kind([some], planner, sets)
    assert batch_kind([plan_of([], [])], planner, sets) in sets


def test_ragged_keys_anywhere_and_of_any_length_share_their_kernels() -> None:
    configs = [
        AttentionConfig(ragged_view(8, 128, "fp16", at, at, at), 32, "fp16", Scoring(1.0), False)
        for at in (1024, 4096)
    ]
    one, other = (kernel_sets(config.shape, "sm_90a", MULTIPROCESSORS) for config in configs)
    assert one is other


def test_only_measured_kernels_replace_the_usual_ones() -> None:
    def kinds(config: AttentionConfig, arch: str = "sm_90a") -> set[BatchKind]:
        return set(kernel_sets(config.shape, arch, MULTIPROCESSORS)) - {"usual"}

    pair = {"pair fixed", "pair whole"}
    alone = {"wide fixed", "wide whole", "few fixed", "few whole", *pair}
    assert kinds(config_of()) == {"short decode", "short prefill", *alone}
    assert kinds(config_of("fp8_e4m3")) == alone - pair
    assert kinds(config_of("fp8_e4m3", head_dim=64)) == set()
    assert kinds(config_of(head_dim=64)) == {"long prefill", *alone}
    assert kinds(config_of(head_dim=64, page_size=8)) == alone
    assert kinds(config_of(head_dim=256)) == alone - pair
    assert kinds(config_of(page_size=5)) == {"short decode", "wide fixed", "wide whole"}
    assert kinds(config_of(cap=30.0)) == set()
    assert kinds(config_of(), "sm_80") == set()


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3"])
@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (192, 5)])
def test_whatever_a_batch_may_launch_is_compiled_before_a_service_starts(
    dtype: DType, head_dim: int, page_size: int, numerics: Numerics
) -> None:
    split_keys = 0 if numerics == "fast" else 2048
    prepared = service_specs("sm_90a", head_dim, dtype, page_size, numerics)
    view = ragged_view(8, head_dim, "fp16", 0, 0, 0)
    ragged = AttentionConfig(view, 32, "fp16", Scoring(1.0), False)
    for base in (config_of(dtype, head_dim, page_size), ragged):
        for cap, scale, masked in product((0.0, 30.0), (1.0, -1.0), (False, True)):
            config = base._replace(scoring=Scoring(scale, cap), masked=masked)
            for kernels in kernel_sets(
                config.shape, "sm_90a", MULTIPROCESSORS, split_keys, page_size
            ).values():
                joining = () if kernels.joining is None else (kernels.joining,)
                every = {
                    k for (_, first), k in kernels.few_rows.items() if base != ragged or not first
                }
                every |= {*kernels.kernels, *joining}
                assert {kernel.spec for kernel in every} <= set(prepared)
    for longest in (1, 2, 4, 8, 40):
        for partials, dim in ((True, head_dim), (False, head_dim), (False, 0)):
            sizes = (1000, longest, MULTIPROCESSORS)
            how = merge_launch(dim, partials, "fp16", *sizes, bool(split_keys))
            assert how.spec in prepared


@pytest.mark.parametrize(
    ("rows", "keys", "kind"),
    [
        ([1, 16], 3000, "few fixed"),
        ([1, 17], 3000, "usual"),
        ([1] * 100, 3000, "pair fixed"),
        ([17, *[1] * 16], 3000, "pair fixed"),
        ([17, *[1] * 15], 3000, "usual"),
        ([480, *[1] * 9], 3000, "few beside many"),
        ([480, *[1] * 8], 3000, "usual"),
        ([416, *[1] * 9], 3000, "usual"),
    ],
)
def test_with_fixed_splits_a_batch_is_reported_by_what_its_runs_cost(
    rows: list[int], keys: int, kind: BatchKind
) -> None:
    kernels = kernel_sets(config_of().shape, "sm_90a", MULTIPROCESSORS, 2048)
    planner, plan = kernels["usual"].planner, plan_of(rows, [keys] * len(rows))
    assert batch_kind([plan], planner, kernels) == kind
    assert kernels[kind].kernels[0].rows == (128 if kind == "usual" else 64)
    pairs = kind in ("pair fixed", "few beside many")
    assert kernels[kind].kernels[0].blocks == (2 if pairs else 1)
    assert kernels[kind].kernels[-1].rows == (128 if kind in ("usual", "few beside many") else 64)
    fp8 = kernel_sets(config_of("fp8_e4m3").shape, "sm_90a", MULTIPROCESSORS, 2048)
    assert batch_kind([plan], fp8["usual"].planner, fp8) in fp8


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "first"),
    [
        ("fp16", 128, 16, 1024),
        ("fp8_e4m3", 128, 16, 512),
        ("fp16", 64, 16, 0),
        ("bf16", 128, 5, 1025),
        ("fp16", 128, 4096, 0),
    ],
)
def test_the_first_of_the_fixed_splits_is_short_and_whole_pages(
    dtype: DType, head_dim: int, page_size: int, first: int
) -> None:
    split_keys = page_size * -(-2048 // page_size)
    shape = config_of(dtype, head_dim, page_size).shape
    for contiguous in (False, True):
        shape = shape._replace(contiguous=contiguous, page_size=1 if contiguous else page_size)
        sets = kernel_sets(shape, "sm_90a", MULTIPROCESSORS, split_keys, page_size)
        assert {one.planner.splits for one in sets.values()} == {Splits(split_keys, first)}


@pytest.mark.parametrize(
    ("head_dim", "pool_page", "entry"),
    [(128, 16, "attend_wide"), (128, 5, "attend_wide"), (192, 5, "attend_tile")],
)
def test_with_fixed_splits_ragged_keys_have_the_kernel_of_the_pool(
    head_dim: int, pool_page: int, entry: str
) -> None:
    ragged = config_of(head_dim=head_dim).shape._replace(contiguous=True, page_size=1)
    sets = kernel_sets(ragged, "sm_90a", MULTIPROCESSORS, 2048, pool_page)
    assert {kernel.entry for one in sets.values() for kernel in one.kernels} == {entry}
