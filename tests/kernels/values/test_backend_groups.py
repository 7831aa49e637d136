"""Pools of several groups of layers: one memory, in which a page is any group's."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.backend import Attend, LayerGroup, PagePlaces, PoolGeometry, Scoring
from tests.kernels.pooled import Pooled, as_computed, bars, check, expected, int32, normal

PAGES = 64
WINDOWED = LayerGroup((0, 2, 3, 5), 4, 64, 64, 8, "fp16", window=24)
FULL = LayerGroup((1, 6), 2, 128, 128, 32, "fp16")
OTHER = LayerGroup((4,), 2, 64, 64, 16, "bf16", window=9)
GROUPS = (WINDOWED, FULL, OTHER)


def pool_of(groups=GROUPS, layout="NHD") -> PoolGeometry:
    return PoolGeometry.of_groups(groups, PAGES, layout)


def fill(pooled: Pooled, num_keys: int) -> dict[int, tuple]:
    """A run of each layer, in pages of its own group that mean nothing in the other groups'."""
    return {
        layer: pooled.add(num_keys, layer)
        for group in pooled.backend.geometry.groups
        for layer in group.layers
    }


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_every_layer_attends_the_keys_of_its_group(backend, rng, layout, numerics) -> None:
    pooled = Pooled(backend(pool_of(layout=layout), numerics=numerics), rng, "fp16")
    # the runs of a group's layers could share pages, as they do in use: here none does
    runs = fill(pooled, 37)
    for layer, run in runs.items():
        group = pooled.backend.geometry.group_of(layer)
        q = normal(rng, (3, 8, group.head_dim), "fp16")
        for window in (-1, group.window_left):
            scoring = Scoring(group.head_dim**-0.5, window_left=window)
            plan = pooled.flat([run], [3], True, layer)
            got = pooled.backend.attend([Attend(layer, q, plan, scoring)]).result()[0]
            rounded = as_computed(backend.kind, q, "fp16", group.dtype)
            want = expected(rounded, [run], [3], True, scoring)
            check(got, want, bars(backend.kind, "fp16", group.dtype), (layer, window))


def test_layers_of_a_group_share_pages_and_requests_of_all_groups_run_together(
    backend, rng
) -> None:
    pool = backend(pool_of())
    pooled, scoring, requests, wants = Pooled(pool, rng, "fp16"), Scoring(0.1), [], []
    for group in pool.geometry.groups:
        pages = pooled.add(40, group.layers[0]).pages
        for layer in group.layers:
            pooled.free.extend(pages[::-1].tolist())
            run = pooled.add(40, layer)
            assert run.pages.tolist() == pages.tolist()
            q = normal(rng, (2, 4, group.head_dim), "fp16")
            requests.append(Attend(layer, q, pooled.flat([run], [2], True, layer), scoring))
            rounded = as_computed(backend.kind, q, "fp16", group.dtype)
            wants.append((expected(rounded, [run], [2], True, scoring), group.dtype))
    order = rng.permutation(len(requests)).tolist()
    states = pool.attend([requests[i] for i in order]).result()
    for i, state in zip(order, states, strict=True):
        want, dtype = wants[i]
        check(state, want, bars(backend.kind, "fp16", dtype), requests[i].layer)


def test_a_page_that_another_group_had_holds_what_was_written_last(backend, rng) -> None:
    """NaN of one group's bits, left in a page, shows in no state of the next group."""
    pool = backend(pool_of(), poison=False)
    pooled = Pooled(pool, rng, "fp16")
    for layer in WINDOWED.layers:
        dead = np.full((8 * PAGES, 4, 64), np.nan, np.float16)
        pool.append(layer, dead, dead, int32(range(8 * PAGES)))
    run = pooled.add(45, 6)
    q = normal(rng, (4, 8, 128), "fp16")
    scoring = Scoring(0.08)
    got = pool.attend([Attend(6, q, pooled.flat([run], [4], True, 6), scoring)]).result()[0]
    check(got, expected(q, [run], [4], True, scoring), bars(backend.kind, "fp16", "fp16"))


def fingerprints(pool) -> list[bytes]:
    """Digests of all pages."""
    copies = pool.page_copies
    places = PagePlaces(copies.memory(PAGES, pool.geometry.payload_bytes), np.arange(PAGES))
    return copies.read(int32(range(PAGES)), places, copies.mark())()


def test_rows_are_copied_in_the_layers_of_one_group(backend, rng) -> None:
    pool = backend(pool_of())
    pooled = Pooled(pool, rng, "fp16")
    rows = {}
    for group, layer in ((0, 3), (1, 6)):
        run = pooled.add(8, layer)
        src, dst = run.pages[:1], int32([pooled.free.pop()])
        before = fingerprints(pool)
        pool.copy_rows(src, dst, int32([5]), group)
        after = fingerprints(pool)
        assert [page for page in range(PAGES) if after[page] != before[page]] == dst.tolist()
        rows[layer] = run, int32(dst[0] * pool.geometry.groups[group].page_size + np.arange(6))
    for layer, (run, slots) in rows.items():
        k, v = pool.gather(layer, slots, "fp32").result()
        np.testing.assert_array_equal(k[:5], run.k[:5].astype(np.float32))
        np.testing.assert_array_equal(v[:5], run.v[:5].astype(np.float32))
        assert np.isnan(k[5]).all()


def test_stored_rows_come_back_to_the_bit(backend, rng) -> None:
    pool = backend(pool_of(layout="HND"))
    pooled = Pooled(pool, rng, "bf16")
    run = pooled.add(11, 4)
    kind = np.dtype("bfloat16")
    k, v = np.zeros((11, 2, 64), kind), np.zeros((11, 2, 64), kind)
    pool.read_stored(4, pooled.slots(run, 4), (k, v)).result()
    np.testing.assert_array_equal(k.astype(np.float64), run.k)
    to = int32(pooled.free.pop() * 16 + np.arange(11))
    pool.write_stored(4, k, v, to)
    again = pool.gather(4, to, "fp32").result()
    np.testing.assert_array_equal(again[1], run.v.astype(np.float32))


def test_a_page_moves_in_one_piece_whatever_its_group(backend, rng) -> None:
    pool = backend(pool_of(), poison=False)
    pooled, copies, g = Pooled(pool, rng, "fp16"), pool.page_copies, pool.geometry
    runs = [(layer, pooled.add(g.group_of(layer).page_size, layer)) for layer in (5, 1, 4)]
    memory = copies.memory(3, g.payload_bytes)
    places = PagePlaces(memory, np.arange(3))
    digests = copies.read(int32([run.pages[0] for _, run in runs]), places, copies.mark())()
    assert g.num_pieces == 1
    assert [len(one) for one in digests] == [16, 16, 16]
    to = int32([pooled.free.pop() for _ in runs])
    assert copies.write(to, places, copies.mark())() == digests
    for page, (layer, run) in zip(to.tolist(), runs, strict=True):
        size = g.group_of(layer).page_size
        got = pool.gather(layer, int32(page * size + np.arange(size)), "fp32").result()
        np.testing.assert_array_equal(got[0], run.k.astype(np.float32))
        np.testing.assert_array_equal(got[1], run.v.astype(np.float32))


def test_slots_and_rows_are_checked_by_the_group(backend, rng) -> None:
    pool = backend(pool_of())
    rows = np.zeros((1, 4, 64), np.float16)
    with pytest.raises(ValueError, match="slots"):
        pool.append(0, rows, rows, int32([8 * PAGES]))
    with pytest.raises(ValueError, match="k, v"):
        pool.append(1, rows, rows, int32([0]))
    with pytest.raises(ValueError, match="slots"):
        pool.gather(4, int32([16 * PAGES]), "fp16")
    assert np.isnan(pool.gather(1, int32([32 * PAGES - 1]), "fp32").result()[0]).all()
