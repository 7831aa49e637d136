"""Which calls are retried, and their errors: the same for both clients."""

from __future__ import annotations

import time

import attnd
import numpy as np
import pytest
from attnd import Retries

from tests.client.client_stub import (
    QUICK,
    Kind,
    Script,
    Scripted,
    ask,
    attended,
    problem,
    tensor_answer,
)

K = np.zeros((1, 2, 8), np.float32)
Q = np.zeros((1, 4, 8), np.float32)
REFUSED = attnd.ConnectionFailed("refused")
K2 = np.zeros((2, 2, 8), np.float32)
BROKEN = attnd.ReplyLost("reset by peer")
APPENDED = tensor_answer({"lengths": [6]})


def test_a_refused_connection_is_tried_again_whatever_the_call(kind: Kind) -> None:
    script = Script(REFUSED, REFUSED, APPENDED)
    assert ask(kind, script, "append", 0, ["a"], K, K).lengths == (6,)
    assert len(script.requests) == 3


def test_a_batch_of_which_a_cluster_has_done_a_part_is_repeated_with_offsets_only(
    kind: Kind,
) -> None:
    part = problem(503, "not_ready", done=["a"])
    script = Script(part, APPENDED)
    with pytest.raises(attnd.NotReady) as caught:
        ask(kind, script, "append", 0, ["a", "b"], K2, K2)
    assert len(script.requests) == 1 and caught.value.problem["done"] == ["a"]
    again = Script(part, problem(409, "length_mismatch", lengths={"a": 6}))
    with pytest.raises(attnd.LengthMismatch):
        ask(kind, again, "append", 0, ["a", "b"], K2, K2, offsets=[5, 5])
    assert len(again.requests) == 2


def test_an_error_lists_what_all_attempts_of_a_batch_have_changed(kind: Kind) -> None:
    part = problem(503, "not_ready", done=["a"])
    script = Script(part, problem(500, "internal"))
    with pytest.raises(attnd.Internal) as caught:
        ask(kind, script, "append", 0, ["a", "b"], K2, K2, offsets=[5, 5])
    assert caught.value.problem["done"] == ["a"]
    with pytest.raises(attnd.ConnectionFailed) as unreachable:
        ask(kind, Script(part, REFUSED), "append", 0, ["a", "b"], K2, K2, offsets=[5, 5])
    cause = unreachable.value.__cause__
    assert isinstance(cause, attnd.NotReady) and cause.problem["done"] == ["a"]


@pytest.mark.parametrize(
    ("lengths", "done", "is_done"),
    [({"a": 6}, ["b"], True), ({"a": 7}, ["b"], False), ({"a": 6, "b": 6}, [], False)],
)
def test_a_batch_that_two_attempts_have_done_in_parts_is_done(
    kind: Kind, lengths: dict[str, int], done: list[str], is_done: bool
) -> None:
    part = problem(503, "not_ready", done=["a"])
    script = Script(part, problem(409, "length_mismatch", lengths=lengths, done=done))
    if is_done:
        result = ask(kind, script, "append", 0, ["a", "b"], K2, K2, offsets=[5, 5])
        assert result.lengths == (6, 6)
        return
    with pytest.raises(attnd.LengthMismatch) as caught:
        ask(kind, script, "append", 0, ["a", "b"], K2, K2, offsets=[5, 5])
    assert caught.value.problem["done"] == ["a", *done]


def test_an_error_after_a_lost_reply_shows_that_an_earlier_attempt_may_have_been_executed(
    kind: Kind,
) -> None:
    refused = problem(404, "unknown_sequence", sequences=["a"])
    script = Script(BROKEN, refused)
    with pytest.raises(attnd.UnknownSequence) as caught:
        ask(kind, script, "append", 0, ["a"], K, K, offsets=[5])
    assert isinstance(caught.value.__cause__, attnd.ReplyLost)
    with pytest.raises(attnd.UnknownSequence) as caught:
        ask(kind, Script(refused), "append", 0, ["a"], K, K, offsets=[5])
    assert caught.value.__cause__ is None


def test_an_append_whose_reply_was_lost_but_landed_gives_its_lengths(kind: Kind) -> None:
    script = Script(BROKEN, problem(409, "length_mismatch", lengths={"b": 9, "a": 6}))
    k = np.zeros((3, 2, 8), np.float32)
    result = ask(
        kind, script, "append", 0, ["a", "b"], k, k, append_indptr=[0, 1, 3], offsets=[5, 7]
    )
    assert result.lengths == (6, 9)


def test_an_append_after_a_lost_reply_that_someone_else_overtook_is_a_mismatch(kind: Kind) -> None:
    script = Script(BROKEN, problem(409, "length_mismatch", lengths={"a": 7}))
    with pytest.raises(attnd.LengthMismatch) as caught:
        ask(kind, script, "append", 0, ["a"], K, K, offsets=[5])
    assert caught.value.lengths == {"a": 7}


def test_a_decode_whose_append_landed_asks_only_for_the_attention(kind: Kind) -> None:
    script = Script(BROKEN, problem(409, "length_mismatch", lengths={"a": 6}), attended())
    result = ask(
        kind, script, "decode", 0, ["a"], Q, k=K, v=K, offsets=[5], lse_base="2", cascade="never"
    )
    assert result.o.shape == (1, 4, 8)
    last = script.message()
    assert set(last.tensors) == {"q"}
    assert last.fields == {"layer": 0, "sequences": ["a"], "lse_base": "2", "cascade": "never"}


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (503, "not_ready")])
def test_a_busy_service_is_asked_again_even_without_offsets(
    kind: Kind, status: int, code: str
) -> None:
    script = Script(problem(status, code), APPENDED)
    ask(kind, script, "append", 0, ["a"], K, K)
    assert len(script.requests) == 2


def test_retry_after_is_obeyed(kind: Kind) -> None:
    script = Script(problem(429, "overloaded", {"retry-after": "0.2"}), APPENDED)
    began = time.monotonic()
    ask(kind, script, "append", 0, ["a"], K, K, retries=Retries(1, 0.001, 1.0))
    assert time.monotonic() - began >= 0.2


def test_the_fraction_in_the_document_goes_before_the_headers_whole_seconds(kind: Kind) -> None:
    refusal = problem(429, "overloaded", {"retry-after": "30"}, retry_after_s=0.01)
    began = time.monotonic()
    ask(kind, Script(refusal, APPENDED), "append", 0, ["a"], K, K)
    assert time.monotonic() - began < 10


BUSY = problem(503, "not_ready")
NOT_AGAIN: list[tuple[Scripted | Exception, type[attnd.AttndError], Retries]] = [
    (BUSY, attnd.NotReady, Retries(0)),
    (problem(429, "overloaded", {"retry-after": "60"}), attnd.Overloaded, QUICK),
    (problem(400, "malformed_body"), attnd.MalformedBody, QUICK),
    (problem(500, "internal"), attnd.Internal, QUICK),
    (problem(504, "deadline_exceeded"), attnd.DeadlineExceeded, QUICK),
    (problem(507, "out_of_pages"), attnd.OutOfPages, QUICK),
    (problem(409, "length_mismatch", lengths={"a": 6}), attnd.LengthMismatch, QUICK),
    (attnd.TimedOut("slow"), attnd.TimedOut, QUICK),
]
"""No retries left; a `Retry-After` beyond the bound; errors that a retry does not change."""


@pytest.mark.parametrize(("step", "error", "retries"), NOT_AGAIN)
def test_errors_that_are_not_tried_again_are_raised_at_once(
    kind: Kind, step: Scripted | Exception, error: type[attnd.AttndError], retries: Retries
) -> None:
    script = Script(step, APPENDED)
    with pytest.raises(error) as caught:
        ask(kind, script, "append", 0, ["a"], K, K, offsets=[5], retries=retries)
    assert type(caught.value) is error
    assert len(script.requests) == 1
    if isinstance(caught.value, attnd.ServiceError) and isinstance(step, Scripted):
        assert caught.value.status == step.status
        assert caught.value.retry_after_s == (60 if error is attnd.Overloaded else None)


def test_a_deadline_bounds_a_call_with_all_its_retries(kind: Kind) -> None:
    script = Script(problem(429, "overloaded", {"retry-after": "0.25"}))
    began = time.monotonic()
    with pytest.raises(attnd.Overloaded):
        ask(kind, script, "decode", 0, ["a"], Q, deadline=1.2, retries=Retries(1000, 0.25, 0.25))
    assert time.monotonic() - began < 10, "1,000 retries would have taken minutes"
    assert 2 <= len(script.requests) <= 5


def test_a_deadline_already_passed_sends_nothing(kind: Kind) -> None:
    script = Script(attended())
    with pytest.raises(attnd.TimedOut, match="deadline"):
        ask(kind, script, "decode", 0, ["a"], Q, deadline=0.0)
    assert script.requests == []


def test_a_deadline_shortens_the_timeout_of_an_attempt(kind: Kind) -> None:
    script = Script(attended())
    ask(kind, script, "decode", 0, ["a"], Q, deadline=1.5)
    assert 1.0 < script.requests[0].timeout_s <= 1.5


def test_the_rest_of_the_deadline_is_sent(kind: Kind) -> None:
    script = Script(problem(429, "overloaded", {"retry-after": "0.1"}), attended())
    ask(kind, script, "decode", 0, ["a"], Q, deadline=1.5, retries=Retries(1, 0.1, 0.1))
    first, second = (float(r.headers["x-attnd-deadline-ms"]) for r in script.requests)
    assert 1400 < first <= 1500
    assert second <= first - 100
    ask(kind, script, "decode", 0, ["a"], Q)
    assert "x-attnd-deadline-ms" not in script.requests[-1].headers
    ask(kind, script, "decode", 0, ["a"], Q, deadline=1e6)
    assert float(script.requests[-1].headers["x-attnd-deadline-ms"]) == 3_600_000


def test_an_exception_that_is_no_transport_error_passes_through(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        ask(kind, Script(RuntimeError("mine")), "info")
