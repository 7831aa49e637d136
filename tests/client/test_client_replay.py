"""Calls over HTTP that repeat themselves go a shorter way, to the same requests and answers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attnd
import numpy as np
import pytest
from attnd import AsyncClient, Client
from attnd.http.replay import HttpRepeat
from attnd.replay import MOST

from tests.client.client_stub import (
    KINDS,
    QUICK,
    Awaiting,
    Blocking,
    Kind,
    Script,
    Scripted,
    problem,
    tensor_answer,
)

BROKEN = attnd.ReplyLost("reset by peer")


def attended(value: float = 1.0, rows: int = 1, **headers: str) -> Scripted:
    o = np.full((rows, 4, 8), value, np.float32)
    lse = np.full((rows, 4), value, np.float32)
    fields = {"lse_base": "e", "levels": 1, "cascade": False}
    return tensor_answer(fields, {"o": o, "lse": lse}, **headers)


class Bench:
    """One client of a kind for all of a test's calls, and how many of them went the short way."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = Script(attended())
        self.short = 0
        self.runner = asyncio.Runner()
        self.client: Any
        if kind == "sync":
            self.client = Client(transport=Blocking(self.script), retries=QUICK)
        else:
            self.client = AsyncClient(transport=Awaiting(self.script), retries=QUICK)
        request: Callable[..., Any] = HttpRepeat.request

        def counted(repeat: Any, *args: Any) -> Any:
            self.short += 1
            return request(repeat, *args)

        monkeypatch.setattr(HttpRepeat, "request", counted)

    def call(self, name: str, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        client = self.client if deadline is None else self.client.with_options(deadline=deadline)
        made = getattr(client, name)(*args, **kwargs)
        if not asyncio.iscoroutine(made):
            return made

        async def awaited() -> Any:
            return await made

        return self.runner.run(awaited())

    def play(self, *steps: Scripted | Exception) -> None:
        """What the service does from now on."""
        self.script.steps = list(steps)


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(request.param, monkeypatch)
    yield bench
    bench.runner.close()


def rows(value: float, count: int = 1, heads: int = 4) -> Any:
    return np.full((count, heads, 8), value, np.float32)


def test_a_repeated_call_sends_what_its_arrays_and_offsets_are_by_then(bench: Bench) -> None:
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
    assert bench.short == 3


def test_a_repeated_request_is_the_first_one_but_for_its_id(bench: Bench) -> None:
    q = rows(5)
    for _ in range(3):
        bench.call("prefill", 0, ["a"], q, [0, 1], causal=True)
    first, *others = bench.script.requests
    assert bench.short == 2
    for other in others:
        assert b"".join(other.body) == b"".join(first.body)
        assert (other.method, other.target) == (first.method, first.target)
        assert other.timeout_s == first.timeout_s
        ids = {other.headers["x-request-id"], first.headers["x-request-id"]}
        assert len(ids) == 2
        assert {**other.headers, "x-request-id": ""} == {**first.headers, "x-request-id": ""}


def test_other_arguments_shapes_and_types_are_other_calls(bench: Bench) -> None:
    bench.call("decode", 0, ["a"], rows(1))
    bench.call("decode", 1, ["a"], rows(1))
    bench.call("decode", 0, ["b"], rows(1))
    bench.call("decode", 0, ["a"], rows(1), sm_scale=1)
    bench.call("decode", 0, ["a"], rows(1), sm_scale=1.0)
    bench.call("decode", 0, ["a"], rows(1).astype(np.float16))
    bench.call("prefill", 0, ["a"], rows(1), [0, 1])
    bench.play(attended(rows=2))
    bench.call("decode", 0, ["a", "b"], rows(1, 2))
    assert bench.short == 0


def test_views_and_arrays_in_other_orders_are_sent_as_they_read(bench: Bench) -> None:
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
    assert bench.short == len(shapes) - 1


def test_answers_of_other_sizes_values_and_kinds_are_read_as_they_are(bench: Bench) -> None:
    q = rows(1)
    for answer, value, shape in [
        (attended(1.0), 1.0, (1, 4, 8)),
        (attended(2.0), 2.0, (1, 4, 8)),
        (attended(3.0, rows=2), 3.0, (2, 4, 8)),
        (attended(4.0), 4.0, (1, 4, 8)),
        (attended(5.0), 5.0, (1, 4, 8)),
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
    bench.play(attended(6.0))
    assert (bench.call("decode", 0, ["a"], q).o == 6.0).all()
    assert bench.short == 7


def test_an_answer_tells_its_own_id_and_times(bench: Bench) -> None:
    for turn in range(3):
        bench.play(attended(x_request_id=f"id-{turn}", server_timing=f"kernel;dur={turn}"))
        meta = bench.call("decode", 0, ["a"], rows(1)).meta
        assert meta.request_id == f"id-{turn}"
        assert meta.timings["kernel"] == turn / 1e3
    assert bench.short == 2


def test_an_array_of_an_answer_may_be_written_to_and_is_the_callers_own(bench: Bench) -> None:
    q = rows(1)
    kept = [bench.call("decode", 0, ["a"], q) for _ in range(3)]
    kept[1].o[:] = 7
    assert (kept[0].o == 1).all()
    assert (kept[2].o == 1).all()


def test_a_repeated_call_is_tried_again_like_any_other(bench: Bench) -> None:
    q = rows(1)
    bench.call("decode", 0, ["a"], q)
    bench.play(problem(503, "not_ready"), attnd.ConnectionFailed("refused"), BROKEN, attended(2.0))
    assert (bench.call("decode", 0, ["a"], q).o == 2.0).all()
    bodies = {bench.script.content(i) for i in range(1, 5)}
    names = {request.headers["x-request-id"] for request in bench.script.requests[1:]}
    assert (len(bench.script.requests), len(bodies), len(names)) == (5, 1, 1)


def test_a_repeated_append_whose_reply_is_lost_is_never_sent_twice_blindly(bench: Bench) -> None:
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
    assert bench.short == 1


def test_calls_with_a_deadline_tell_it_and_go_the_usual_way(bench: Bench) -> None:
    q = rows(1)
    bench.call("decode", 0, ["a"], q)
    bench.call("decode", 0, ["a"], q, deadline=5.0)
    assert "x-attnd-deadline-ms" in bench.script.requests[-1].headers
    assert bench.short == 0


def test_what_is_not_an_array_of_numbers_is_refused_as_before(bench: Bench) -> None:
    bench.call("decode", 0, ["a"], rows(1))
    told = [[1.0]]
    with pytest.raises((AttributeError, TypeError)):
        bench.call("decode", 0, ["a"], told)
    with pytest.raises(TypeError, match="dtype"):
        bench.call("decode", 0, ["a"], np.array([["x"]]))


def test_no_array_is_kept_and_so_many_calls_are_remembered(bench: Bench) -> None:
    q = rows(1)
    seen = weakref.ref(q)
    for _ in range(2):
        bench.call("decode", 0, ["a"], q)
    bench.script.requests.clear()
    del q
    gc.collect()
    assert seen() is None
    for layer in range(MOST + 10):
        bench.call("decode", layer, ["a"], rows(1))
    assert len(bench.client._repeats.known) <= MOST
