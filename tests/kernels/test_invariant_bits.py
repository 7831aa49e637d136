"""With `numerics: invariant` the bits of a row do not depend on batch, sharing, pages or chunks."""

from __future__ import annotations

import numpy as np
import pytest
from pooled import Pooled, Run, expected, normal, positions, refusals

from bench.bits import Shape, run, shapes
from kernels.backend import Attend, Plan, PoolGeometry, Scoring, Unsupported

SHAPES = shapes(900, 1200, 2, fp32=True)
IDS = [f"{s.geometry.dtype}-{s.geometry.page_size}-{s.geometry.head_dim}" for s in SHAPES]


@pytest.mark.parametrize("num_rows", [300, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_row_has_the_same_bits_however_it_is_computed(backend, rng, shape, num_rows) -> None:
    try:
        made = backend(shape.geometry, numerics="invariant")
    except Unsupported:
        pytest.skip("not on this device")
    rows, different = run(made, shape, rng, num_rows)
    assert rows >= num_rows
    assert different == []


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_few_rows_beside_many_change_no_bits(backend, rng, shape, monkeypatch) -> None:
    """On a device these have a launch each where there are enough of both: here always."""
    if backend.kind == "cpu":
        pytest.skip("a device's")
    choice = pytest.importorskip("kernels.cuda.attention.choice")
    for name in ("BESIDE_KEYS", "BESIDE_TILES"):
        monkeypatch.setattr(choice, name, -1)
    monkeypatch.setattr(choice, "PAIR_TILES", dict.fromkeys(choice.PAIR_TILES, -1))
    try:
        made = backend(shape.geometry, numerics="invariant")
    except Unsupported:
        pytest.skip("not on this device")
    assert run(made, shape, rng, 300)[1] == []


def test_without_it_the_comparison_finds_rows_that_differ(backend, rng) -> None:
    shape: Shape = SHAPES[0]
    rows, different = run(backend(shape.geometry), shape, np.random.default_rng(7), 300)
    assert different, f"{rows} rows"


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("dtype", "page_size", "num_rows"),
    [("fp16", 5, 1), ("fp16", 16, 3), ("fp8_e4m3", 5, 3), ("fp8_e4m3", 16, 1)],
)
def test_rows_over_many_splits_are_right(
    backend, rng, dtype, page_size, head_dim, num_rows
) -> None:
    geometry = PoolGeometry(1, 60000 // page_size, page_size, 2, head_dim, "NHD", dtype)
    with refusals(backend.kind, geometry):
        pooled = Pooled(backend(geometry, numerics="invariant"), rng, "fp16")
    shared = pooled.add(7000 // page_size * page_size)
    own = [pooled.add(int(count)) for count in rng.integers(num_rows, 2900, 9)]
    lens = [shared.num_keys + run.num_keys for run in own]
    rows = [num_rows] * len(own)
    q = normal(rng, (sum(rows), 8, head_dim), "fp16")
    levels = (
        pooled.level([shared], [len(q)], [0], False),
        pooled.level(own, rows, [shared.num_keys] * len(own), True),
    )
    whole = [
        Run(shared.pages, *(np.concatenate(pair) for pair in ((shared.k, r.k), (shared.v, r.v))))
        for r in own
    ]
    alone = pooled.add(9000)
    plans = [Plan(levels, positions(lens, rows)), pooled.flat([alone], [num_rows], True)]
    wanted = [(q, whole, rows), (q[:num_rows], [alone], [num_rows])]
    scoring = Scoring(head_dim**-0.5)
    calls = [Attend(0, one[0], plan, scoring) for one, plan in zip(wanted, plans, strict=True)]
    for got, (given, runs, counts) in zip(
        pooled.backend.attend(calls).result(), wanted, strict=True
    ):
        o, lse = expected(given, runs, counts, True, scoring)
        assert np.abs(got.o.astype(np.float64) - o).max() < 2e-3
        assert np.abs(got.lse - lse).max() < 1e-3


@pytest.mark.parametrize("page_size", [5, 16, 300])
def test_splits_are_whole_pages(backend, page_size) -> None:
    geometry = SHAPES[0].geometry
    made = backend(type(geometry)(1, 8, page_size, 2, 64, "NHD", "fp16"), numerics="invariant")
    assert made.split_keys >= 256 and made.split_keys % page_size == 0
