"""Frames that a caller must not send, and the consequence of each."""

from __future__ import annotations

import array
import os
import socket
import time

import pytest
from attnd.wire import frames as f
from plain_caller import call_frame, calls, grow, problem_of, session_and_caller
from scripted_engine_end import config

from service.road.engine_end.calls import Call


@pytest.mark.parametrize(
    ("given", "status", "detail"),
    [
        ({"route": 8}, 404, "route 8: WELCOME lists the routes"),
        ({"route": 0}, 404, "route 0"),
        ({"request": 8}, 422, "request_offset = 8: a multiple of 64"),
        ({"answer": 1}, 422, "answer_offset = 1: a multiple of 64"),
        ({"length": 4097}, 422, "inside the arena of 4096 bytes"),
        ({"request": 4096, "length": 1}, 422, "inside the arena of 4096 bytes"),
        ({"request": 2**64 - 64, "length": 64}, 422, "inside the arena"),
        ({"length": 2**64 - 1}, 422, "inside the arena"),
        ({"capacity": 2**64 - 1}, 422, "inside the arena"),
        ({"answer": 2**64 - 64, "capacity": 128}, 422, "inside the arena"),
        ({"answer": 4096, "capacity": 1}, 422, "inside the arena"),
    ],
)
def test_a_call_that_breaks_a_rule_is_answered_and_the_session_continues(
    given: dict[str, int], status: int, detail: str
) -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(1, **given), call_frame(2))
        assert [call.id for call in calls(session)] == [2]
        (answer,) = caller.answers()
        assert (answer.id, answer.status) == (1, status)
        assert detail in problem_of(answer)["detail"], problem_of(answer)


def test_more_calls_than_may_wait_are_refused_as_overload() -> None:
    with session_and_caller(config(max_calls=2)) as (session, caller):
        caller.send(*(call_frame(number) for number in range(3)))
        waiting = calls(session)
        assert len(waiting) == 2
        (answer,) = caller.answers()
        assert (answer.id, answer.status) == (2, 429)
        assert problem_of(answer)["retry_after_s"] == 1.0
        session.answer(waiting[0], 200, 0, f.NO_STAGES)
        caller.send(call_frame(2))
        assert [call.id for call in calls(session)] == [2]


STEP = f.frame(f.STEP, f.STEP_HEAD.pack(1, 0, bytes(16)) + b"{}")
OFFENCES = [
    (STEP + STEP, "STEP 1 while 1 waits for its answer"),
    (call_frame(1) + STEP, "STEP 1 while 1 waits for its answer"),
    (f.frame(f.STEP, bytes(33)), "payload of 33 bytes in STEP: between 34 and"),
    (f.frame(f.READY, f.LAYER_PAYLOAD.pack(77, 0)), "READY for 77, which is a CALL"),
    (65 * f.frame(f.DEVICE, b'{"arena_bytes":1}'), "DEVICE while 64 wait for DEVICE_ARENA"),
    (f.frame(f.DEVICE, b"[]"), "DEVICE is not a JSON object"),
    (f.frame(f.OPENED, bytes(10)), "frame kind 26: this end reads"),
    (call_frame(1, reserved=7), "tenant field of CALL 1 is 7: send 0"),
    (call_frame(1) + call_frame(1), "CALL 1 while call 1 waits for its answer"),
    (f.frame(f.HELLO, b'{"version":1,"arena_bytes":1}'), "HELLO came twice"),
    (f.frame(f.CALL, bytes(63)), "payload of 63 bytes in CALL: exactly 64"),
    (f.frame(f.CANCEL, bytes(9)), "payload of 9 bytes in CANCEL: exactly 8"),
    (f.frame(f.ANSWER, bytes(56)), "frame kind 2: this end reads"),
    (f.frame(99, b""), "frame kind 99: this end reads"),
    (f.HEADER.pack(f.GROW, 0, 2**31), "payload of 2147483648 bytes in GROW"),
    (f.HEADER.pack(f.CANCEL, 3, 8), "frame flags 3 of CANCEL"),
    (f.frame(f.GROW, b"[]"), "GROW is not a JSON object"),
    (f.frame(f.GROW, b"{}"), "arena_bytes in GROW: must be given"),
    (f.frame(f.GROW, b'{"arena_bytes":true}'), "in GROW: must be an integer, not true"),
    (f.frame(f.GROW, b'{"arena_bytes":-1}'), "arena_bytes in GROW: must be greater"),
    (f.frame(f.GROW, b'{"arena_bytes":' + b"9" * 5000 + b"}"), "GROW is not JSON"),
    (f.frame(f.GROW, b"\xff{}"), "GROW is not UTF-8"),
    (f.frame(f.GROW, b'{"a":' * 8000), "GROW is nested too deep"),
]


@pytest.mark.parametrize(("offence", "detail"), OFFENCES, ids=[detail for _, detail in OFFENCES])
def test_what_breaks_the_protocol_ends_the_session_with_the_reason(
    offence: bytes, detail: str
) -> None:
    with session_and_caller(config()) as (session, caller):
        caller.send(call_frame(77), offence, call_frame(88))
        read = [event for _ in range(4) for event in session.read()]  # long ones come in parts
        events = [event.id for event in read if isinstance(event, Call)]
        assert 77 in events and 88 not in events
        assert detail in session.ended
        kind, refused = caller.one()
        assert kind == f.REFUSED
        assert detail in refused["detail"] and refused["code"] == "malformed_request", refused
        assert session.read() == []


EARLY = [
    (STEP, "STEP before HELLO"),
    (f.frame(f.DEVICE, b'{"arena_bytes":1}'), "DEVICE before HELLO"),
    (call_frame(1), "CALL before HELLO"),
    (grow(4096), "GROW before HELLO"),
    (f.frame(f.HELLO, b'{"version":2,"arena_bytes":1}'), "version 2: this service speaks"),
    (f.frame(f.HELLO, b'{"version":1}'), "arena_bytes in HELLO: must be given"),
    (f.frame(f.HELLO, b'{"version":1,"arena_bytes":1,"name":"a\\nb"}'), "name in HELLO: must"),
    (f.frame(f.HELLO, b'{"version":1,"arena_bytes":1,"name":7}'), "name in HELLO: must be text"),
    (f.frame(f.HELLO, b'{"version":1,"arena_bytes":1,"door":1}'), "door in HELLO: must be true"),
    (b"GET / HTTP/1.1\r\n\r\n", "frame kind 17735"),
]


@pytest.mark.parametrize(("offence", "detail"), EARLY, ids=[detail for _, detail in EARLY])
def test_a_wrong_beginning_is_refused_without_an_arena(offence: bytes, detail: str) -> None:
    with session_and_caller(config(), greet=False) as (session, caller):
        caller.send(offence)
        assert session.read() == []
        kind, refused = caller.one()
        assert kind == f.REFUSED and caller.descriptors == []
        assert detail.split(".*")[0] in refused["detail"], refused


def test_a_caller_that_never_reads_is_dropped() -> None:
    with session_and_caller(config()) as (session, caller):
        caller.sock.setblocking(True)
        for _ in range(10_000):
            caller.send(call_frame(1, 8))  # each is answered with a problem
            session.read()
            assert len(session.output.waiting) < 2**17
            if session.ended:
                break
        assert session.ended.startswith("the caller does not read: ")


def test_unexpected_descriptors_are_closed_by_the_system() -> None:
    with session_and_caller(config()) as (session, caller):
        before = len(os.listdir("/proc/self/fd"))
        reading, writing = os.pipe()
        rights = array.array("i", [writing] * 50)
        frame = call_frame(1)
        caller.sock.sendmsg([frame[:10]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        caller.sock.sendmsg([frame[10:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(writing)
        while not calls(session):
            pass
        assert os.read(reading, 1) == b"", "the other end is still open"
        os.close(reading)
        assert len(os.listdir("/proc/self/fd")) == before


def test_missing_memory_for_an_arena_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("service.road.arena.anonymous_file", fail)
    with session_and_caller(config(), greet=False) as (session, caller):
        caller.hello()
        assert session.read() == []
        kind, refused = caller.one()
        assert (kind, refused["status"]) == (f.REFUSED, 429)
        assert "Too many open files" in refused["detail"]


def test_the_answer_to_a_huge_frame_costs_no_time() -> None:
    with session_and_caller(config()) as (session, caller):
        text = b'{"arena_bytes":[' + b"[]," * 21_000 + b"[]]}"
        caller.sock.setblocking(True)
        caller.send(f.frame(f.GROW, text))
        started = time.monotonic()
        while not session.ended:
            session.read()
        assert "GROW has" in session.ended and time.monotonic() - started < 5
