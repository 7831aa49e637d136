"""Windows return pages when a reply is sent, and never those that a call may still read.

The scheduler runs without sockets, round by round; pages are overwritten as they become free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.engine.loop.job import Job
from service.errors import WindowReturned
from tests.engine.fake_backend import GEOMETRY, dense_row
from tests.engine.harness import NewCall, append, creation, decode, gather, queries, rows
from tests.engine.poison import has_poison, poison_freed_pages
from tests.engine.rounds import Rounds

WINDOW = 6
SIZE = GEOMETRY.page_size
FULL, WINDOWED = 0, 1
"""Layers."""


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """A pool of two layers, one with a window."""
    whole = GEOMETRY.groups[0]
    groups = replace(whole, layers=(FULL,)), replace(whole, layers=(WINDOWED,), window=WINDOW)
    made = Rounds(geometry=replace(GEOMETRY, layer_groups=groups))
    poison_freed_pages(monkeypatch, made.store)
    return made


class Written:
    """The rows that were written to a sequence, by layer."""

    def __init__(self, rounds: Rounds, name: str) -> None:
        self.rounds, self.name = rounds, name
        self.k: dict[int, list[Any]] = {FULL: [], WINDOWED: []}
        self.v: dict[int, list[Any]] = {FULL: [], WINDOWED: []}

    def write(self, call: NewCall) -> NewCall:
        layer = call.fields["layer"]
        self.k[layer].append(call.tensors["k"])
        self.v[layer].append(call.tensors["v"])
        return call

    def append(self, n: int, seed: int, layers: Sequence[int] = (FULL, WINDOWED)) -> list[Job]:
        made = [self.write(append(self.name, n, layer, seed + layer)) for layer in layers]
        return [self.rounds.ask(call) for call in made]

    def decode(self, seed: int, layers: Sequence[int] = (FULL, WINDOWED)) -> list[tuple[Job, Any]]:
        """A token at each layer; the jobs with what they should answer."""
        found = []
        for layer in layers:
            call = decode(self.name, layer=layer, seed=seed + layer, new=True, **window_of(layer))
            found.append((self.rounds.ask(self.write(call)), self.expected(call)))
        return found

    def expected(self, call: NewCall) -> Any:
        """The last rows of the sequence, attended in float64."""
        layer, q = call.fields["layer"], call.tensors["q"]
        k, v = np.concatenate(self.k[layer]), np.concatenate(self.v[layer])
        o = []
        for at, row in enumerate(q):
            stop = len(k) - len(q) + at + 1
            first = max(0, stop - WINDOW) if layer == WINDOWED else 0
            o.append(dense_row(row, k[first:stop], v[first:stop], row.shape[-1] ** -0.5)[0])
        return np.array(o)


def window_of(layer: int) -> dict[str, Any]:
    return {"window_left": WINDOW - 1} if layer == WINDOWED else {}


def begun(rounds: Rounds, *names: str) -> list[Written]:
    rounds.ask(creation(*({"id": name} for name in names)))
    rounds.finish()
    return [Written(rounds, name) for name in names]


def check(rounds: Rounds, found: Sequence[tuple[Job, Any]]) -> None:
    rounds.finish()
    for job, expected in found:
        assert job.error is None, job.error
        o = job.request.place.tensors["o"]
        assert not has_poison(o)
        np.testing.assert_allclose(o, expected, rtol=1e-4, atol=1e-5)
    rounds.store.tree.check_integrity()


def num_bundles(rounds: Rounds, name: str) -> int:
    """Pages that a sequence has in the group with a window."""
    tree = rounds.store.tree
    assert tree.satellites is not None
    leaf = tree.books.leaf(name)
    pages = leaf.table.read(0, int(tree.books.num_pages[leaf.index]))
    return int(np.count_nonzero(tree.satellites.has(tree.satellites.windows[0], pages)))


def test_decodes_of_many_rounds_hold_their_window_and_see_all_of_it(rounds: Rounds) -> None:
    pair = begun(rounds, "a", "b")
    for step in range(24):
        check(rounds, [one for written in pair for one in written.decode(100 * step)])
        assert num_bundles(rounds, "a") <= -(-WINDOW // SIZE) + 1
    tree = rounds.store.tree
    assert tree.allocator.num_pages - tree.allocator.num_free == 2 * (6 + num_bundles(rounds, "b"))


def prefill(name: str, n: int, layer: int) -> NewCall:
    """The last rows of a sequence, once more."""
    fields = {"layer": layer, "sequences": [name], "qo_indptr": [0, n], "causal": True}
    return NewCall("prefill", fields | window_of(layer), {"q": queries(7 * n, n)})


def test_pages_that_a_waiting_call_reads_are_not_given_to_the_one_behind_it(rounds: Rounds) -> None:
    """Earlier rows are attended again while the last token is decoded: their pages must not go to
    another sequence, whose rows are written before the launch begins."""
    first, other = begun(rounds, "a", "b")
    for step in range(9):
        check(rounds, first.decode(100 * step))
    gates = rounds.backend.step_by_step()
    rounds.backend.late = True
    found = first.decode(2000)
    rounds.scheduler.take_turns()
    rounds.scheduler.launches.submit()
    again = prefill("a", 5, WINDOWED)
    found.append((rounds.ask(again), first.expected(again)))
    rounds.scheduler.take_turns()
    assert len(rounds.answered) == 1 + 18
    for gate in gates:
        gate.set()
    rounds.scheduler.launches.reply()
    assert len(rounds.answered) == 1 + 20
    other.append(9, 31)
    rounds.scheduler.take_turns()
    rounds.backend.let_all()
    check(rounds, found)


def test_rows_in_flight_keep_what_they_see_until_they_cannot_be_undone(rounds: Rounds) -> None:
    """A decode is answered while a prefill behind it is on the device, which then fails."""
    (written,) = begun(rounds, "a")
    for step in range(15):
        check(rounds, written.decode(100 * step, [FULL] if step > 8 else [FULL, WINDOWED]))
    gates = rounds.backend.step_by_step()
    rounds.backend.late = True
    found = written.decode(1000, [WINDOWED])
    rounds.scheduler.take_turns()
    rounds.scheduler.launches.submit()
    first = list(gates)
    rounds.backend.failures["result"] = [RuntimeError("lost")]
    again = prefill("a", 5, WINDOWED).but(k=rows(81, 5), v=rows(82, 5))
    job = rounds.ask(written.write(again))
    rounds.scheduler.take_turns()
    rounds.scheduler.launches.submit()
    assert rounds.store.tree.describe("a").lengths == (15, 15)
    assert not rounds.backend.failures["result"]
    for gate in first:
        gate.set()
    rounds.scheduler.launches.reply()
    assert len(rounds.answered) == 1 + 24 + 1
    rounds.backend.let_all()
    rounds.finish()
    assert job.error is not None  # it was alone
    check(rounds, [*found, (rounds.ask(again), written.expected(again))])
    check(rounds, written.decode(3000))


def test_rows_of_a_launch_that_fails_are_undone_with_all_that_they_saw(rounds: Rounds) -> None:
    pair = begun(rounds, "a", "b")
    for step in range(20):
        rounds.backend.failures["result"] = [RuntimeError("lost")]
        found = [one for written in pair for one in written.decode(100 * step)]
        rounds.finish()
        check(rounds, [one for one in found if one[0].error is None])
        for written in pair:
            lengths = rounds.store.tree.describe(written.name).lengths
            for layer in (FULL, WINDOWED):
                if lengths[layer] < len(written.k[layer]):  # it failed, and changed nothing
                    written.k[layer].pop()
                    written.v[layer].pop()
                    check(rounds, written.decode(7000 + step, [layer]))
    assert num_bundles(rounds, "a") <= -(-WINDOW // SIZE) + 1


@pytest.mark.parametrize("is_long", [False, True])
def test_rows_of_an_append_can_be_attended_by_a_later_call(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    if is_long:
        pace = type(rounds.store.pace)
        monkeypatch.setattr(pace, "is_long", lambda self, kind, cost: kind == "append")
    (written,) = begun(rounds, "a")
    for step in range(4):
        written.append(5, 100 * step)
        rounds.finish()
        found = []
        for layer in (FULL, WINDOWED):
            q = queries(7 + step, 5)
            call = NewCall(
                "prefill",
                {"layer": layer, "sequences": ["a"], "qo_indptr": [0, 5], "causal": True}
                | window_of(layer),
                {"q": q},
            )
            found.append((rounds.ask(call), written.expected(call)))
        check(rounds, found)
    assert num_bundles(rounds, "a") <= -(-(WINDOW + 5) // SIZE) + 1
    assert num_bundles(rounds, "a") < 5


def test_a_call_that_needs_returned_pages_gets_their_numbers(rounds: Rounds) -> None:
    (written,) = begun(rounds, "a")
    for step in range(16):
        check(rounds, written.decode(100 * step))
    refused = [
        rounds.ask(NewCall("truncate", {"id": "a", "length": 9})),
        rounds.ask(creation({"id": "b", "parent": "a", "length": 9})),
        rounds.ask(gather("a", layer=WINDOWED)),
    ]
    rounds.finish()
    for job in refused:
        assert isinstance(job.error, WindowReturned)
        assert job.error.extra["sequences"] == ["a"]
        assert (job.error.extra["group"], job.error.extra["kept"]) == (1, 8)
    read = rounds.ask(NewCall("gather", gather("a", layer=WINDOWED).fields | {"start": 8}))
    fork = rounds.ask(creation({"id": "b", "parent": "a", "length": 14}))
    rounds.finish()
    assert read.error is fork.error is None
    k = np.concatenate(written.k[WINDOWED])
    np.testing.assert_array_equal(read.request.place.tensors["k"], k[8:])
    forked = Written(rounds, "b")
    for layer in (FULL, WINDOWED):
        forked.k[layer] = [np.concatenate(written.k[layer])[:14]]
        forked.v[layer] = [np.concatenate(written.v[layer])[:14]]
    check(rounds, [*forked.decode(9000), *written.decode(9100)])


def test_an_append_to_both_groups_at_once_writes_to_the_pages_of_each(rounds: Rounds) -> None:
    (written,) = begun(rounds, "a")
    layers = [FULL, WINDOWED]
    k, v = (np.stack([rows(seed, 5), rows(seed + 5, 5)]) for seed in (1, 2))
    fields = {"layers": layers, "sequences": ["a"], "append_indptr": [0, 5]}
    rounds.ask(NewCall("append", fields, {"k": k, "v": v}))
    for layer in layers:
        written.k[layer], written.v[layer] = [k[layer]], [v[layer]]
    check(rounds, written.decode(50))
