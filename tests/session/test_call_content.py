"""Calls of equal shapes send their own indices and ids, for every client."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import pytest
from attnd import Session

from tests.client.client_stub import QUICK, Kind, Message, Script, attended, client_of
from tests.session.scripted_engine import Answers, Bench, Seen

ROWS = 6
IDS = ("a", "b", "c", "d")
INDEX_KINDS: tuple[Callable[[list[int]], Any], ...] = (
    list,
    tuple,
    lambda values: np.array(values, np.int32),
    lambda values: np.array(values, np.int64),
    lambda values: np.array(values, np.uint16),
    lambda values: np.repeat(np.array(values, np.int64), 2)[::2],
)
ID_KINDS: tuple[Callable[[list[str]], Any], ...] = (list, tuple, np.array)

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Sent(Protocol):
    """Clients under test: one for all calls, and a new one for each."""

    def known(self, call: Call) -> Message: ...

    def fresh(self, call: Call) -> Message: ...


class OverHttp:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.script = Script(ANSWER)
        self.client = client_of(kind, script=self.script, retries=QUICK)

    def known(self, call: Call) -> Message:
        name, args, kwargs = call
        getattr(self.client, name)(*args, **kwargs)
        return self.script.message()

    def fresh(self, call: Call) -> Message:
        with closing(OverHttp(self.kind)) as other:
            return other.known(call)

    def close(self) -> None:
        self.client.close()


class OverTheRoad:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.engine = bench.start(self.play)
        self.session = bench.session()

    def play(self, seen: Seen) -> Answers:
        if seen.operation == "append":
            return Answers({"lengths": [1]})
        shape = seen.arrays["q"].shape
        arrays = {"o": np.ones(shape, np.float32), "lse": np.ones(shape[:2], np.float32)}
        return Answers({"lse_base": "e", "levels": 1, "cascade": False}, arrays)

    def send(self, session: Session, call: Call) -> Message:
        name, args, kwargs = call
        getattr(session, name)(*args, **kwargs)
        seen = self.engine.seen[-1]
        return Message(seen.fields, seen.arrays)

    def known(self, call: Call) -> Message:
        return self.send(self.session, call)

    def fresh(self, call: Call) -> Message:
        with self.bench.session() as session:
            return self.send(session, call)


ANSWER = attended(ROWS, dtype=np.float32, lengths=[1])
"""Every one of the calls may read it."""


@pytest.fixture(params=["sync", "async", "session"])
def sent(request: pytest.FixtureRequest, bench: Bench) -> Iterator[Sent]:
    if request.param == "session":
        yield OverTheRoad(bench)
    else:
        with closing(OverHttp(request.param)) as made:
            yield made


def check(sent: Sent, call: Call) -> None:
    known, fresh = sent.known(call), sent.fresh(call)
    assert known.fields == fresh.fields
    assert known.tensors.keys() == fresh.tensors.keys()
    for name, array in fresh.tensors.items():
        np.testing.assert_array_equal(known.tensors[name], array)


def random_call(chance: random.Random) -> Call:
    """One of few operations and shapes, so that most calls are like an earlier one."""
    ids: Any = chance.choice(ID_KINDS)(chance.sample(IDS, 3))
    cuts = sorted(chance.choices(range(ROWS + 1), k=2))
    indptr = chance.choice(INDEX_KINDS)([0, *cuts, ROWS])
    values = np.random.default_rng(chance.randrange(2**32))
    q, k, v = (values.normal(size=(ROWS, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    if chance.random() < 0.3:
        v = k
    kwargs: dict[str, Any] = {}
    if chance.random() < 0.5:
        kwargs["offsets"] = chance.choice(INDEX_KINDS)(chance.choices(range(9), k=3))
    if chance.random() < 0.5:
        return "append", (0, ids, k, v), kwargs | {"append_indptr": indptr}
    if chance.random() < 0.5:
        kwargs |= {"k": k, "v": v}
    if chance.random() < 0.2:
        kwargs["mask"] = values.random(ROWS * 5) < 0.5
    if chance.random() < 0.3:
        kwargs["sinks"] = values.normal(size=4).astype(np.float32)
    if chance.random() < 0.5:
        return "prefill", (0, ids, q, indptr), kwargs
    return "prefill", (0, ids), kwargs | {"q": q, "qo_indptr": indptr}


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_equal_shapes_send_their_own_indices_and_ids(sent: Sent, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        check(sent, random_call(chance))


def test_an_append_with_other_prefix_sums_sends_them(sent: Sent) -> None:
    k = np.ones((ROWS, 2, 8), np.float32)
    for sums in ([0, 2, ROWS], [0, 5, ROWS]):
        call = ("append", (0, ["a", "b"], k, k + 1), {"append_indptr": np.array(sums)})
        assert sent.known(call).fields["append_indptr"] == sums


def test_indices_changed_in_place_are_sent_as_they_are_by_then(sent: Sent) -> None:
    k = np.ones((ROWS, 2, 8), np.float32)
    array, listed, ids = np.array([0, 2, ROWS]), [0, 2, ROWS], ["a", "b"]
    for cut, name in ((3, "b"), (4, "c"), (5, "d")):
        array[1] = listed[1] = cut
        ids[1] = name
        for sums in (array, listed):
            call = ("append", (0, ids, k, k + 1), {"append_indptr": sums})
            fields = sent.known(call).fields
            assert fields["append_indptr"] == [0, cut, ROWS]
            assert fields["sequences"] == ["a", name]


def test_one_array_given_twice_may_be_two_the_next_time(sent: Sent) -> None:
    k, v = np.ones((ROWS, 2, 8), np.float32), np.zeros((ROWS, 2, 8), np.float32)
    for pair in ((k, k), (k, v), (v, v), (v, k), (k, k)):
        message = sent.known(("append", (0, ["a"], *pair), {"append_indptr": [0, ROWS]}))
        np.testing.assert_array_equal(message.tensors["k"], pair[0])
        np.testing.assert_array_equal(message.tensors["v"], pair[1])
