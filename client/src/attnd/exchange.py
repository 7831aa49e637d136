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
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx

from attnd.call import Call, Settled, read_reply
from attnd.errors import (
    AttndError,
    ConnectionFailed,
    NotReady,
    Overloaded,
    ReplyLost,
    ServiceError,
    TimedOut,
    TransportError,
)

T = TypeVar("T")

NOTHING_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
BROKEN: Final = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)

MAX_DEADLINE_MS: Final = 3_600_000.0
"""The longest deadline the service takes; a longer one is only kept here."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send this request; send back the response, or the httpx.TransportError raised."""

    method: str
    path: str
    params: Mapping[str, str | int]
    body: bytes | None
    headers: dict[str, str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep; send back None."""

    seconds: float


Outcome = httpx.Response | httpx.TransportError | None


def exchange(
    call: Call[T], manner: Manner, now: Callable[[], float] = time.monotonic
) -> Generator[Send | Wait, Outcome, T]:
    """Drive `call` to its answer; raises `AttndError`."""
    request_id = manner.request_id or uuid.uuid4().hex
    ends = None if manner.deadline_s is None else now() + manner.deadline_s
    attempt, lost = 0, False
    while True:
        left = None if ends is None else ends - now()
        if left is not None and left <= 0:
            raise TimedOut(f"the deadline of {manner.deadline_s} s passed", request_id)
        outcome = yield send(call, manner, request_id, left)
        try:
            return parse(call, outcome, request_id)
        except AttndError as error:
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


def send(call: Call[T], manner: Manner, request_id: str, left: float | None) -> Send:
    """One attempt; with `left` seconds to the deadline, the service is told them too."""
    headers = {**call.headers, "x-request-id": request_id}
    timeout_s = manner.timeout_s
    if left is not None:
        timeout_s = min(timeout_s, left)
        headers["x-attnd-deadline-ms"] = f"{min(left * 1e3, MAX_DEADLINE_MS):.3f}"
    return Send(call.method, call.path, call.params, call.body, headers, timeout_s)


def parse(call: Call[T], outcome: Outcome, request_id: str) -> T:
    """The answer in an outcome; raises the `AttndError` that it is otherwise."""
    if isinstance(outcome, httpx.Response):
        return call.parse(read_reply(outcome, request_id, call.also_answers))
    told = f"{call.method} {call.path}: {outcome}"
    if isinstance(outcome, NOTHING_SENT):
        raise ConnectionFailed(told, request_id) from outcome
    if isinstance(outcome, httpx.TimeoutException):
        raise TimedOut(told, request_id) from outcome
    if isinstance(outcome, BROKEN):
        raise ReplyLost(told, request_id) from outcome
    raise TransportError(told, request_id) from outcome


def may_repeat(call: Call[T], error: AttndError) -> bool:
    """Whether sending `call` again after `error` is safe, and could help."""
    if isinstance(error, (ConnectionFailed, Overloaded, NotReady)):
        return True
    return isinstance(error, ReplyLost) and call.repeatable
