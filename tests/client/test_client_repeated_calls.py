"""Repeated calls over HTTP send the rows and offsets of each call, and read each answer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import attnd
import numpy as np
import pytest

from tests.client.client_stub import (
    QUICK,
    Kind,
    Script,
    Scripted,
    attended,
    client_of,
    problem,
    tensor_answer,
)

BROKEN = attnd.ReplyLost("reset by peer")


class Bench:
    """One client of a kind for all calls of a test."""

    def __init__(self, kind: Kind) -> None:
        self.script = Script(attended())
        self.client = client_of(kind, script=self.script, retries=QUICK)

    def call(self, name: str, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        return getattr(self.client.with_options(deadline=deadline), name)(*args, **kwargs)

    def play(self, *steps: Scripted | Exception) -> None:
        """Set the service's next steps."""
        self.script.steps = list(steps)


@pytest.fixture
def bench(kind: Kind) -> Iterator[Bench]:
    bench = Bench(kind)
    with bench.client:
        yield bench


def rows(value: float, count: int = 1, heads: int = 4) -> Any:
    return np.full((count, heads, 8), value, np.float32)


def test_a_repeated_call_sends_its_own_arrays_and_offsets(bench: Bench) -> None:
    for turn in range(4):
        q, k = rows(turn), rows(10 + turn, heads=2)
        bench.call("decode", 3, ["a"], q, k=k, v=k + 1, offsets=[turn], lse_base="2")
        seen = bench.script.message()
        assert (seen.tensors["q"] == turn).all()
        assert (seen.tensors["k"] == 10 + turn).all()
        assert (seen.tensors["v"] == 11 + turn).all()
        assert seen.fields == {
            "layer": 3,
            "sequences": ["a"],
            "offsets": [turn],
            "lse_base": "2",
        }


def test_a_repeated_request_is_the_first_one_but_for_its_id(bench: Bench) -> None:
    q = rows(5)
    for _ in range(3):
        bench.call("prefill", 0, ["a"], q, [0, 1], causal=True)
    first, *others = bench.script.requests
    for other in others:
        assert b"".join(other.body) == b"".join(first.body)
        assert (other.method, other.target) == (first.method, first.target)
        assert other.timeout_s == first.timeout_s
        assert other.request_id != first.request_id
        assert other.headers == first.headers


def test_views_and_arrays_in_other_orders_are_sent_in_row_order(bench: Bench) -> None:
    wide = np.arange(64, dtype=np.float32).reshape(1, 8, 8)
    shapes: list[Any] = [
        rows(1),
        wide[:, ::2],
        wide[:, 4:],
        np.asfortranarray(wide[:, :4]),
        wide[0].T[None, :4],
    ]
    for q in shapes:
        bench.call("decode", 0, ["a"], q)
        np.testing.assert_array_equal(bench.script.message().tensors["q"], q)


def test_answers_of_other_sizes_values_and_kinds_are_read_correctly(bench: Bench) -> None:
    q = rows(1)
    for answer, value, shape in [
        (attended(1, 1.0), 1.0, (1, 4, 8)),
        (attended(1, 2.0), 2.0, (1, 4, 8)),
        (attended(2, 3.0), 3.0, (2, 4, 8)),
        (attended(1, 4.0), 4.0, (1, 4, 8)),
        (attended(1, 5.0), 5.0, (1, 4, 8)),
    ]:
        bench.play(answer)
        result = bench.call("decode", 0, ["a"], q)
        assert result.o.shape == shape
        assert (result.o == value).all()
        assert (result.lse == value).all()
    bench.play(problem(404, "unknown_sequence", sequences=["a"]))
    with pytest.raises(attnd.UnknownSequence):
        bench.call("decode", 0, ["a"], q)
    bench.play(Scripted(200, b"<html>", {"content-type": "text/html"}))
    with pytest.raises(attnd.ProtocolError):
        bench.call("decode", 0, ["a"], q)
    bench.play(attended(1, 6.0))
    assert (bench.call("decode", 0, ["a"], q).o == 6.0).all()


def test_an_answer_has_its_own_id_and_times(bench: Bench) -> None:
    for turn in range(3):
        bench.play(attended(x_request_id=f"id-{turn}", server_timing=f"kernel;dur={turn}"))
        meta = bench.call("decode", 0, ["a"], rows(1)).meta
        assert meta.request_id == f"id-{turn}"
        assert meta.timings["kernel"] == turn / 1e3


def test_an_array_of_an_answer_may_be_written_to_and_is_the_callers_own(bench: Bench) -> None:
    q = rows(1)
    kept = [bench.call("decode", 0, ["a"], q) for _ in range(3)]
    kept[1].o[:] = 7
    assert (kept[0].o == 1).all()
    assert (kept[2].o == 1).all()


def test_a_repeated_call_is_retried(bench: Bench) -> None:
    q = rows(1)
    bench.call("decode", 0, ["a"], q)
    bench.play(
        problem(503, "not_ready"), attnd.ConnectionFailed("refused"), BROKEN, attended(1, 2.0)
    )
    assert (bench.call("decode", 0, ["a"], q).o == 2.0).all()
    bodies = {bench.script.content(i) for i in range(1, 5)}
    names = {request.request_id for request in bench.script.requests[1:]}
    assert (len(bench.script.requests), len(bodies), len(names)) == (5, 1, 1)


def test_an_append_without_offsets_is_not_sent_again_after_a_lost_reply(
    bench: Bench,
) -> None:
    k = rows(1, heads=2)
    bench.play(tensor_answer({"lengths": [6]}))
    assert bench.call("append", 0, ["a"], k, k + 1).lengths == (6,)
    bench.play(BROKEN, tensor_answer({"lengths": [7]}))
    with pytest.raises(attnd.ReplyLost):
        bench.call("append", 0, ["a"], k, k + 1)
    assert len(bench.script.requests) == 2


def test_a_repeated_append_that_landed_though_its_reply_was_lost_gives_its_lengths(
    bench: Bench,
) -> None:
    k = rows(1, heads=2)
    bench.play(tensor_answer({"lengths": [6]}))
    bench.call("append", 0, ["a"], k, k + 1, offsets=[5])
    bench.play(BROKEN, problem(409, "length_mismatch", lengths={"a": 7}))
    assert bench.call("append", 0, ["a"], k, k + 1, offsets=[6]).lengths == (7,)


def test_a_repeated_call_with_a_deadline_sends_it(bench: Bench) -> None:
    q = rows(1)
    bench.call("decode", 0, ["a"], q)
    bench.call("decode", 0, ["a"], q, deadline=5.0)
    assert "x-attnd-deadline-ms" in bench.script.requests[-1].headers


def test_no_array_is_kept_by_the_client(bench: Bench) -> None:
    q = rows(1)
    seen = weakref.ref(q)
    for _ in range(2):
        bench.call("decode", 0, ["a"], q)
    bench.script.requests.clear()
    del q
    gc.collect()
    assert seen() is None
