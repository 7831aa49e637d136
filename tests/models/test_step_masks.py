"""Masks of steps: random trees of drafts against float64, what a cut keeps, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attnd import InvalidRequest
from attnd.torch import TorchSession

import tests.oracle as oracle
from kernels import cuda_devices
from tests.models.test_torch_steps import PLACES, ignoring_time_slices
from tests.session.stepping import (
    HEADS,
    LAYERS,
    Served,
    embed,
    fresh,
    go_through,
    inputs,
    serve,
    session_of,
)

SCALE = 64**-0.5
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@pytest.fixture(scope="module", params=PLACES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, _, is_embedded = request.param.partition(", ")
    if kind == "cuda" and not cuda_devices():
        pytest.skip("no CUDA device")
    with (embed if is_embedded else serve)(kind, tmp_path_factory.mktemp("steps")) as running:
        yield running


@pytest.fixture
def session(served: Served) -> Iterator[TorchSession]:
    with ignoring_time_slices(), session_of(served) as made:
        yield made
        made.delete_sequences(prefix="")
        reply = made.pool()
        assert reply.integrity == "ok" and reply.free == reply.total, reply


class Mirror:
    """The keys and values that sequences hold, as float64, by name and layer."""

    def __init__(self, served: Served, session: TorchSession) -> None:
        self.served, self.session = served, session
        self.rows: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, name: str, parent: str | None = None) -> None:
        fresh(self.session, [name], parent)
        empty = np.empty((0, 2, 64))
        self.rows[name] = list(self.rows[parent]) if parent else [(empty, empty)] * LAYERS

    def run(self, names: list[str], lens: list[int], seed: int, slots: Any, **options: Any) -> Any:
        """A prefill step in `slots`; o and lse of each layer."""
        indptr = [0, *np.cumsum(lens).tolist()]
        with self.session.step(names, slots, qo_indptr=indptr, **options) as step:
            got = go_through(step, range(LAYERS), seed)
        step.wait()
        if options.get("append", True):
            for layer in range(LAYERS):
                given = inputs(slots.rows, layer, seed, self.served.dtype)
                for name, a, b in zip(names, indptr[:-1], indptr[1:], strict=True):
                    k, v = self.rows[name][layer]
                    k, v = (
                        np.concatenate([k, given["k"][a:b]]),
                        np.concatenate([v, given["v"][a:b]]),
                    )
                    self.rows[name][layer] = k, v
        return got

    def expect(
        self, got: Any, names: list[str], masks: list[Mask], seed: int, rows: int, **rules: Any
    ) -> None:
        """The step's states are the oracle's, of these masks over the last rows."""
        causal, window = rules.get("causal", True), rules.get("window_left", -1)
        for layer in range(LAYERS):
            q, first = inputs(rows, layer, seed, self.served.dtype)["q"], 0
            for name, mask in zip(names, masks, strict=True):
                k, v = self.rows[name][layer]
                n, m = len(mask), len(k)
                whole = np.ones((n, m), bool)
                whole[:, max(m - n, 0) :] = mask[:, max(n - m, 0) :]
                seen = oracle.visible(n, m, causal=causal, window_left=window, mask=whole)
                o, lse = oracle.attend(q[first : first + n], k, v, seen, sm_scale=SCALE)
                mine = got[layer][0][first : first + n], got[layer][1][first : first + n]
                bar = 4e-3 if self.served.kind == "cuda" else 2e-5
                assert np.abs(mine[0] - o).max(initial=0) <= bar, (name, layer)
                both = np.isfinite(lse)
                assert (np.isfinite(mine[1]) == both).all() and np.isneginf(mine[1][~both]).all()
                assert np.abs(mine[1][both] - lse[both]).max(initial=0) <= bar, (name, layer)
                first += n


def tree(rng: np.random.Generator, n: int) -> Mask:
    """Each row sees itself and its ancestors, which come before it; row 0 is a root."""
    seen = np.eye(n, dtype=bool)
    for i in range(1, n):
        if rng.random() < 0.8:
            seen[i] |= seen[rng.integers(i)]
    return seen


def write(slots: Any, masks: list[Mask]) -> None:
    """Masks in the slots' place, whose rest is left as it was."""
    if slots.mask.dtype == torch.bool:
        flat = np.concatenate([mask.reshape(-1) for mask in masks])
    else:
        flat = np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
    slots.mask[: flat.size].copy_(torch.from_numpy(flat))


@pytest.mark.parametrize("kind", [True, "packed"])
@pytest.mark.parametrize(
    "rules",
    [{}, {"causal": False}, {"window_left": 6}, {"cascade": "always"}, {"cascade": "never"}],
    ids=str,
)
def test_trees_of_drafts_in_steps_equal_float64(
    served: Served, session: TorchSession, kind: Any, rules: dict[str, Any]
) -> None:
    rng, mirror = np.random.default_rng(7), Mirror(served, session)
    mirror.add("root")
    mirror.run(["root"], [41], 1, session.slots(41, HEADS))
    for name, parent in (("a", "root"), ("b", "root"), ("new", None)):
        mirror.add(name, parent)
    mirror.run(["a"], [3], 2, session.slots(3, HEADS))
    names = ["a", "b", "new"]
    slots = session.slots(20, HEADS, rotation=2, mask=kind)
    for turn, lens in enumerate([[5, 1, 7], [9, 8, 3], [9, 8, 3], [9, 8, 3], [1, 1, 1]]):
        masks = [tree(rng, n) for n in lens]
        write(slots, masks)
        seed = 100 + turn
        got = mirror.run(names, lens, seed, slots, mask=True, **rules)
        got = {layer: (o[: sum(lens)], lse[: sum(lens)]) for layer, (o, lse) in got.items()}
        mirror.expect(got, names, masks, seed, 20, **rules)


def test_a_row_may_see_neither_itself_nor_any_row_of_the_step(
    served: Served, session: TorchSession
) -> None:
    rng, mirror = np.random.default_rng(3), Mirror(served, session)
    mirror.add("old")
    mirror.run(["old"], [10], 1, session.slots(10, HEADS))
    mirror.add("new")
    slots = session.slots(12, HEADS, mask=True)
    masks = [rng.random((6, 6)) < 0.5, rng.random((6, 6)) < 0.5]
    for mask in masks:
        mask[2] = False
    write(slots, masks)
    got = mirror.run(["old", "new"], [6, 6], 5, slots, mask=True, causal=False)
    mirror.expect(got, ["old", "new"], masks, 5, 12, causal=False)
    o, lse = got[0]
    assert np.isfinite(lse[2]).all() and np.isneginf(lse[8]).all() and (o[8] == 0).all()


def test_slots_with_a_mask_show_all_rows_until_it_is_written(
    served: Served, session: TorchSession
) -> None:
    mirror = Mirror(served, session)
    for kind in (True, "packed"):
        mirror.add(f"a{kind}")
        slots = session.slots(9, HEADS, mask=kind)
        got = mirror.run([f"a{kind}"], [9], 5, slots, mask=True)
        mirror.expect(got, [f"a{kind}"], [np.ones((9, 9), bool)], 5, 9)
        write(slots, [np.zeros((9, 9), bool)])  # a step without the mask does not read it
        got = mirror.run([f"a{kind}"], [9], 6, slots)
        mirror.expect(got, [f"a{kind}"], [np.ones((9, 9), bool)], 6, 9)


def test_a_mask_without_new_tokens_covers_the_last_rows_also_if_they_are_more_than_the_keys(
    served: Served, session: TorchSession
) -> None:
    rng, mirror = np.random.default_rng(4), Mirror(served, session)
    for name, length in (("a", 30), ("b", 3)):
        mirror.add(name)
        mirror.run([name], [length], length, session.slots(length, HEADS))
    slots = session.slots(12, HEADS, mask=True)
    masks = [tree(rng, 7), rng.random((5, 5)) < 0.6]
    write(slots, masks)
    got = mirror.run(["a", "b"], [7, 5], 5, slots, mask=True, append=False, causal=False)
    mirror.expect(got, ["a", "b"], masks, 5, 12, causal=False)


def test_the_accepted_branch_is_kept_and_the_next_step_sees_it_alone(
    served: Served, session: TorchSession
) -> None:
    mirror = Mirror(served, session)
    mirror.add("a")
    mirror.run(["a"], [19], 1, session.slots(19, HEADS))
    slots = session.slots(4, HEADS, mask=True)
    drafts = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    for turn in range(3):
        write(slots, [drafts])
        got = mirror.run(["a"], [4], 10 + turn, slots, mask=True)
        mirror.expect(got, ["a"], [drafts], 10 + turn, 4)
        length = len(mirror.rows["a"][0][0]) - 4
        session.truncate("a", length, keep=[length, length + 2, length + 3])
        kept = [*range(length), length, length + 2, length + 3]
        mirror.rows["a"] = [(k[kept], v[kept]) for k, v in mirror.rows["a"]]
    whole = mirror.run(["a"], [2], 50, session.slots(2, HEADS))
    mirror.expect(whole, ["a"], [np.ones((2, 2), bool)], 50, 2)


def test_a_mask_is_read_once_at_the_first_layer(served: Served, session: TorchSession) -> None:
    rng, mirror = np.random.default_rng(5), Mirror(served, session)
    mirror.add("a")
    slots, mask = session.slots(6, HEADS, mask=True), tree(rng, 6)
    write(slots, [mask])
    given = [inputs(6, layer, 8, served.dtype) for layer in range(LAYERS)]
    got = {}
    with session.step(["a"], slots, qo_indptr=[0, 6], mask=True) as step:
        for layer in range(LAYERS):
            for name, array in given[layer].items():
                getattr(step, name)(layer).copy_(torch.from_numpy(array))
            step.attend(layer)
            got[layer] = (
                step.o(layer).float().cpu().clone().numpy(),
                step.lse(layer).cpu().clone().numpy(),
            )
            slots.mask.fill_(False)
    step.wait()
    mirror.rows["a"] = [(one["k"].astype(float), one["v"].astype(float)) for one in given]
    mirror.expect(got, ["a"], [mask], 8, 6)


@contextmanager
def refused(session: TorchSession, match: str, kind: type[Exception]) -> Iterator[None]:
    before = session.get_sequence("a").lengths
    with pytest.raises(kind, match=match):
        yield
    assert session.get_sequence("a").lengths == before


def test_masks_that_cannot_be_are_refused_before_any_change(
    served: Served, session: TorchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(session, ["a"])
    plain, masked = session.slots(2, HEADS), session.slots(2, HEADS, mask=True)
    with refused(session, r"have no mask: make them with slots\(\.\.\., mask=True\)", ValueError):
        session.step(["a"], plain, qo_indptr=[0, 2], mask=True)
    with pytest.raises(ValueError, match="have no mask"):
        _ = plain.mask
    with (
        refused(session, "absent from a decode: send a prefill of one row", InvalidRequest),
        session.step(["a"], masked, mask=True),
    ):
        pass
    monkeypatch.setitem(masked._others_at, "mask", 2**40)
    with (
        refused(session, "its 4 bytes must be inside the arena", InvalidRequest),
        session.step(["a"], masked, qo_indptr=[0, 2], mask=True),
    ):
        pass
    monkeypatch.setitem(masked._others_at, "packed_mask", 64)
    with (
        refused(session, "mask and packed_mask cannot be combined", InvalidRequest),
        session.step(["a"], masked, qo_indptr=[0, 2], mask=True),
    ):
        pass


def test_a_mask_that_becomes_too_large_is_refused_with_its_size(tmp_path: Path) -> None:
    with serve("cpu", tmp_path) as running, running.session() as session:
        fresh(session, ["a"])
        slots = session.slots(23200, HEADS, mask="packed")
        rule = "a bit for each row and key takes 71270400 bytes, at most 16777216: send fewer rows"
        with (
            pytest.raises(InvalidRequest, match=rule),
            session.step(["a"], slots, qo_indptr=[0, 23200], mask=True, append=True),
        ):
            pass
        assert session.get_sequence("a").length == 0
