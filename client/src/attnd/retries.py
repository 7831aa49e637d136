"""From a `Call` to its answer, retries and deadline included, without doing any input or output.

`first` is the attempt that every call begins with. Where it fails, `repeated` goes on: a generator
that yields what to do next (`Send` or `Wait`) and is sent what came of it. The clients only carry
out those steps, so they cannot differ in anything else.

What is sent again, within `Retries.attempts`:
  always      nothing had been sent (connection refused), or the service said 429 or 503
  repeatable  the reply was lost (connection broke): only calls that do no harm twice
  never       anything else, a timeout after sending included: the time given was used up
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from attnd.calls.call import Call, Reply, Settled
from attnd.errors import (
    AttndError,
    ConnectionFailed,
    NotReady,
    Overloaded,
    ReplyLost,
    SequenceMoving,
    ServiceError,
    TimedOut,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `attempts` more sends; waits double from `first_wait_s`, jittered, to `max_wait_s`.

    `Retry-After` is obeyed up to `max_wait_s`; a service that asks for more gets no retry, and the
    caller its error.
    """

    attempts: int = 2
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0

    def wait_s(self, attempt: int, error: AttndError) -> float | None:
        """Seconds to wait before attempt number `attempt` (from 1); None: give up."""
        if attempt > self.attempts:
            return None
        asked = error.retry_after_s if isinstance(error, ServiceError) else None
        if asked is not None:
            return asked if asked <= self.max_wait_s else None
        wait_s = min(self.max_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))
        return wait_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Manner:
    """How calls are made. `timeout_s` bounds one attempt, `deadline_s` a call with its retries."""

    timeout_s: float = 30.0
    deadline_s: float | None = None
    retries: Retries = Retries()
    request_id: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether calls are told neither their deadline nor their id."""
        return self.deadline_s is None and self.request_id is None


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Send(Generic[T]):
    """Send this call once; send back the reply, or the `AttndError` raised.

    `deadline_s` is what is left of the call's deadline, which the service is told and which passes
    at `ends` by `time.monotonic`.
    """

    call: Call[T]
    request_id: str
    timeout_s: float
    deadline_s: float | None = None
    ends: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep; send back None."""

    seconds: float


Outcome = Reply | AttndError | None


def first(call: Call[T], manner: Manner) -> Send[T]:
    """The first attempt; raises `TimedOut` for a deadline that has passed already."""
    request_id = manner.request_id or os.urandom(16).hex()
    if manner.deadline_s is None:
        return Send(call, request_id, manner.timeout_s)
    return in_time(call, request_id, manner, time.monotonic() + manner.deadline_s)


def in_time(call: Call[T], request_id: str, manner: Manner, ends: float | None) -> Send[T]:
    """An attempt within what is left until `ends`; raises `TimedOut` when nothing is."""
    if ends is None:
        return Send(call, request_id, manner.timeout_s)
    left = ends - time.monotonic()
    if left <= 0:
        raise TimedOut(f"the deadline of {manner.deadline_s} s passed", request_id)
    return Send(call, request_id, min(manner.timeout_s, left), left, ends)


def repeated(
    tried: Send[T], error: AttndError, manner: Manner
) -> Generator[Send[Any] | Wait, Outcome, T]:
    """Drive a call whose first attempt failed to its answer; raises `AttndError`."""
    call, request_id, ends = tried.call, tried.request_id, tried.ends
    outcome: Outcome = None
    attempt, lost = 0, False
    try:
        while True:
            error.request_id = error.request_id or request_id
            recovery = call.recover(error) if lost and isinstance(error, ServiceError) else None
            if isinstance(recovery, Settled):
                return recovery.value
            if recovery is not None:
                call, lost = recovery, False
            else:
                if ends is not None and isinstance(error, ConnectionFailed):
                    check_deadline(ends, manner, error)
                lost = lost or isinstance(error, ReplyLost)
                attempt += 1
                wait = manner.retries.wait_s(attempt, error) if may_repeat(call, error) else None
                if wait is None or (ends is not None and time.monotonic() + wait >= ends):
                    raise error
                yield Wait(wait)
            outcome = yield in_time(call, request_id, manner, ends)
            try:
                return answer(call, outcome)
            except AttndError as failed:
                error = failed
    finally:
        del error, outcome  # an error's traceback leads to this frame


def check_deadline(ends: float, manner: Manner, error: AttndError) -> None:
    """Raises `TimedOut` where the deadline passed while a connection was made."""
    if time.monotonic() >= ends:
        told = f"the deadline of {manner.deadline_s} s passed: {error}"
        raise TimedOut(told, error.request_id) from error


def answer(call: Call[T], outcome: Outcome) -> T:
    """What the call answers with this outcome; raises the `AttndError` that it is otherwise."""
    if isinstance(outcome, Reply):
        return call.parse(outcome)
    if outcome is None:
        raise RuntimeError("an attempt without an outcome: this is a bug")
    raise outcome


def may_repeat(call: Call[T], error: AttndError) -> bool:
    """Whether sending `call` again after `error` is safe, and could help."""
    if isinstance(error, (ConnectionFailed, Overloaded, NotReady, SequenceMoving)):
        return True
    return isinstance(error, ReplyLost) and call.repeatable
