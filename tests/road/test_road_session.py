"""Sessions: calls and answers, cancelling, growth, and how a session ends."""

from __future__ import annotations

import socket

import pytest
from attnd.wire import frames as f
from attnd.wire.frames import cancel_frame
from plain_caller import call_frame, calls, grow, problem_of, session_and_caller
from scripted_engine_end import LIMITS, ROUTES, config

from service.errors import InvalidRequest
from service.road.arena import Pinning
from service.road.engine_end.calls import Call, Cancel
from service.road.messages import State

SECONDS = (0.5, 0.25, 0.125, 1.0, 2.0, 4.0)


def test_welcome_has_the_limits_and_the_arena() -> None:
    with session_and_caller(config(), greet=False) as (session, caller):
        assert not session.greeted
        caller.hello(5000, name="unit:1")
        assert session.read() == [] and session.greeted and session.name == "unit:1"
        kind, detail = caller.one()
        assert kind == f.WELCOME
        assert detail == {
            "version": 1,
            "session": 1,
            "instance_id": "scripted",
            "arena_bytes": 8192,
            "max_arena_bytes": 2**20,
            "pinned_bytes": 0,
            "routes": ROUTES,
            "limits": LIMITS,
            "state": "ready",
            "reason": "",
        }
        assert len(caller.map()) == 8192


def test_a_call_carries_its_places_and_its_answer_comes_back() -> None:
    with session_and_caller(config()) as (session, caller):
        theirs = caller.map()
        theirs[64:69] = b"image"
        name = bytes(range(16))
        caller.send(call_frame(7, 9, request=64, length=5, deadline_us=1_500_000, request_id=name))
        (call,) = calls(session)
        assert (call.id, call.operation, call.deadline_s, call.request_id) == (7, 9, 1.5, name)
        assert bytes(call.request) == b"image"
        call.answer[:3] = b"yes"
        session.answer(call, 201, 3, SECONDS)
        (answer,) = caller.answers()
        assert (answer.id, answer.status, answer.flags, answer.length) == (7, 201, 0, 3)
        assert answer.stages == SECONDS
        assert theirs[1024:1027] == b"yes"
        assert session.live == {}


def test_only_doors_get_the_number_of_held_pages() -> None:
    with session_and_caller(config()) as (session, caller):
        for is_door, detail in ((False, (0, 0)), (True, (f.HELD, 70_000))):
            session.standing.is_door = is_door
            caller.send(call_frame(1))
            session.answer(calls(session)[0], 200, 0, f.NO_STAGES, 70_000)
            (answer,) = caller.answers()
            assert (answer.flags, answer.held) == detail


def test_a_call_without_a_deadline_gets_the_engines() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1, deadline_us=0))
        assert calls(session)[0].deadline_s == 30.0


def test_calls_are_answered_in_any_order() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(*(call_frame(number) for number in (3, 1, 2)))
        first, second, third = calls(session)
        assert [first.id, second.id, third.id] == [3, 1, 2]
        for call in (third, first, second):
            session.answer(call, 200, 0, f.NO_STAGES)
        assert [answer.id for answer in caller.answers()] == [2, 3, 1]


def test_an_id_may_be_used_again_after_its_answer() -> None:
    with session_and_caller(config()) as (session, caller):
        for _ in range(3):
            caller.send(call_frame(5))
            session.answer(calls(session)[0], 200, 0, f.NO_STAGES)
        assert [answer.id for answer in caller.answers()] == [5, 5, 5]


def test_a_failed_call_carries_its_problem_in_the_frame() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1))
        session.fail(calls(session)[0], InvalidRequest("layer", 9, "at most 3"), SECONDS, needed=5)
        (answer,) = caller.answers()
        assert (answer.status, answer.flags, answer.needed) == (422, f.INLINE, 5)
        assert answer.length == len(answer.image)
        assert problem_of(answer)["field"] == "layer"


def test_places_may_be_empty_and_end_with_the_arena() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(
            call_frame(1, length=0, capacity=0),
            call_frame(2, request=4096, length=0, answer=4096, capacity=0),
            call_frame(3, request=0, length=4096, answer=0, capacity=4096),
        )
        sizes = [(len(call.request), len(call.answer)) for call in calls(session)]
        assert sizes == [(0, 0), (0, 0), (4096, 4096)]


def test_cancel_names_the_call_once_and_says_nothing_of_answered_ones() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1), call_frame(2))
        first, second = calls(session)
        session.answer(first, 200, 0, f.NO_STAGES)
        caller.send(cancel_frame(1), cancel_frame(2), cancel_frame(2), cancel_frame(99))
        (event,) = session.read()
        assert isinstance(event, Cancel) and event.call is second and second.cancelled
        session.answer(second, 200, 0, f.NO_STAGES)
        assert [answer.id for answer in caller.answers()] == [1, 2]


def test_a_cancel_before_hello_means_nothing() -> None:
    with session_and_caller(config(), greet=False) as (session, caller):
        caller.send(cancel_frame(1))
        assert session.read() == [] and session.ended == ""


def test_keys_of_hello_that_are_not_known_are_passed_over() -> None:
    with session_and_caller(config(), greet=False) as (session, caller):
        caller.send(f.frame(f.HELLO, b'{"version":1,"arena_bytes":1,"colour":"blue"}'))
        assert session.read() == [] and session.greeted


def test_growth_is_answered_with_the_size_that_there_is() -> None:
    with session_and_caller(config()) as (session, caller):
        for asked, size in ((4097, 8192), (0, 8192), (2**63 - 1, 2**20)):
            caller.send(grow(asked))
            assert session.read() == []
            assert caller.one() == (f.GROWN, {"arena_bytes": size, "pinned_bytes": 0})
        caller.send(call_frame(1, request=2**20 - 64))
        assert len(calls(session)) == 1
        assert len(caller.map()) == 2**20


def test_a_pinned_arena_grows_once_no_call_uses_it() -> None:
    pinned: list[int] = []

    def pin(memory: memoryview) -> bool:
        pinned.append(len(memory))
        return True

    pinning = Pinning(pin, lambda memory: pinned.remove(len(memory)))
    with session_and_caller(config(pinning=pinning)) as (session, caller):
        assert session.pinned
        caller.send(call_frame(1), call_frame(2), grow(8192))
        first, second = calls(session)
        session.answer(first, 200, 0, f.NO_STAGES)
        assert pinned == [4096] and len(caller.answers()) == 1
        session.fail(second, RuntimeError())
        assert pinned == [8192]
        (_, _), (kind, grown) = caller.receive()
        assert kind == f.GROWN and grown == b'{"arena_bytes":8192,"pinned_bytes":8192}'
        caller.send(call_frame(3), grow(2**14), grow(2**15))
        (third,) = session.read()
        assert "GROW while another waits" in session.ended
        session.close()
        assert pinned == [8192], "the device may still be at it"
        assert isinstance(third, Call)
        session.answer(third, 200, 0, f.NO_STAGES)
        assert pinned == []


def test_state_is_sent_after_hello_only() -> None:
    with session_and_caller(config(), greet=False) as (session, caller):
        session.send_state(State("starting", "compiling"))
        assert list(caller.receive()) == []
        caller.hello()
        session.read()
        assert caller.one()[1]["state"] == "starting"
        session.send_state(State("draining", "SIGTERM"))
        assert caller.one() == (f.STATE, {"state": "draining", "reason": "SIGTERM"})


@pytest.mark.parametrize("rest", [0, 1, 7, 8, 40, 71])
def test_a_caller_that_dies_ends_its_session_and_its_arena_waits_for_the_last_answer(
    rest: int,
) -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1), call_frame(3), call_frame(2)[:rest])
        call, last = calls(session)
        caller.sock.close()
        assert session.read() == []
        detail = f"the caller left, {rest} bytes into a frame" if rest else "the caller left"
        assert session.ended == detail
        session.close()
        assert session.arena is not None and session.arena.fd >= 0
        call.answer[:] = bytes(64)
        session.answer(call, 200, 64, f.NO_STAGES)
        assert session.arena.fd >= 0
        session.answer(last, 200, 0, f.NO_STAGES)
        assert session.arena.fd == -1 and session.live == {}


def test_a_caller_that_closes_its_sending_side_has_left() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.sock.shutdown(socket.SHUT_WR)
        assert session.read() == []
        assert session.ended == "the caller left"


def test_an_answer_to_a_disconnected_caller_ends_the_session_quietly() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1))
        (call,) = calls(session)
        caller.sock.close()
        session.answer(call, 200, 0, f.NO_STAGES)
        assert "the connection broke" in session.ended


def test_answering_twice_is_a_bug_that_shows() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1))
        (call,) = calls(session)
        session.answer(call, 200, 0, f.NO_STAGES)
        with pytest.raises(RuntimeError, match="call 1 was answered twice; this is a bug"):
            session.answer(call, 200, 0, f.NO_STAGES)


def test_a_slow_reader_gets_every_answer_in_order() -> None:
    with session_and_caller(config(max_calls=4096)) as (session, caller):
        got: list[int] = []
        sent = 0
        while len(got) < 3000:
            while sent < 3000 and not session.wants_write:
                caller.send(call_frame(sent))
                for call in calls(session):
                    session.answer(call, 200, 0, f.NO_STAGES)
                sent += 1
            got += [answer.id for answer in caller.answers()]
            session.flush()
        assert got == list(range(3000)) and not session.wants_write


def test_every_session_has_an_arena_of_its_own() -> None:
    with session_and_caller(config()) as (_, one), session_and_caller(config()) as (_, other):
        one.map()[:4] = b"mine"
        assert other.map()[:4] == bytes(4)


def test_one_read_takes_in_a_bounded_number_of_calls() -> None:
    with session_and_caller(config(max_calls=1000)) as (session, caller):
        caller.send(*(call_frame(number) for number in range(1, 801)))
        counts = [len(session.read()) for _ in range(6)]
    assert sum(counts) == 800, counts
    assert max(counts) <= 256, "others have their turns while each may be refused"
