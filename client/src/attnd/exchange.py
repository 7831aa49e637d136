"""From a `Call` to its answer, retries and deadline included, without doing any input or output.

`exchange` is a generator: it yields what to do next (`Send` or `Wait`) and is sent what came of it.
The sync and the async client only carry out those steps, so they cannot differ in anything else.

What is sent again, within `Retries.attempts`:
  always      nothing had been sent (connection refused), or the service said 429 or 503
  repeatable  the reply was lost (connection broke): only calls that do no harm twice
  never       anything else, a timeout after sending included: the time given was used up
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from attnd.call import Call, Reply, Settled
from attnd.errors import (
    AttndError,
    ConnectionFailed,
    NotReady,
    Overloaded,
    ReplyLost,
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


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Send(Generic[T]):
    """Send this call once; send back the reply, or the `AttndError` raised.

    `deadline_s` is what is left of the call's deadline, which the service is told.
    """

    call: Call[T]
    request_id: str
    timeout_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep; send back None."""

    seconds: float


Outcome = Reply | AttndError | None


def exchange(
    call: Call[T], manner: Manner, now: Callable[[], float] = time.monotonic
) -> Generator[Send[Any] | Wait, Outcome, T]:
    """Drive `call` to its answer; raises `AttndError`."""
    request_id = manner.request_id or f"{random.getrandbits(128):032x}"
    ends = None if manner.deadline_s is None else now() + manner.deadline_s
    attempt, lost = 0, False
    while True:
        left = None if ends is None else ends - now()
        if left is not None and left <= 0:
            raise TimedOut(f"the deadline of {manner.deadline_s} s passed", request_id)
        timeout_s = manner.timeout_s if left is None else min(manner.timeout_s, left)
        outcome = yield Send(call, request_id, timeout_s, left)
        try:
            return answer(call, outcome)
        except AttndError as error:
            error.request_id = error.request_id or request_id
            if lost and isinstance(error, ServiceError):
                recovery = call.recover(error)
                if isinstance(recovery, Settled):
                    return recovery.value
                if recovery is not None:
                    call, lost = recovery, False
                    continue
            if not may_repeat(call, error):
                raise
            lost = lost or isinstance(error, ReplyLost)
            attempt += 1
            wait = manner.retries.wait_s(attempt, error)
            if wait is None or (ends is not None and now() + wait >= ends):
                raise
        yield Wait(wait)


def answer(call: Call[T], outcome: Outcome) -> T:
    """What the call answers with this outcome; raises the `AttndError` that it is otherwise."""
    if isinstance(outcome, Reply):
        return call.parse(outcome)
    if outcome is None:
        raise RuntimeError("an attempt without an outcome: this is a bug")
    raise outcome


def may_repeat(call: Call[T], error: AttndError) -> bool:
    """Whether sending `call` again after `error` is safe, and could help."""
    if isinstance(error, (ConnectionFailed, Overloaded, NotReady)):
        return True
    return isinstance(error, ReplyLost) and call.repeatable
