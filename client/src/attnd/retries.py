"""From a `Call` to its result, with retries and deadline, without any input or output.

`first_attempt` is the attempt that every call begins with. Where it fails, `retrying` takes over: a
generator that yields the next step (`Attempt` or `Pause`) and is sent the reply, or thrown the
error. The clients only execute these steps, so they cannot differ in anything else.

Calls that are sent again, within `Retries.attempts`:
  always      nothing was sent (connection refused), or the service answered 429 or 503, and has
              changed nothing
  repeatable  the reply was lost (connection broke): only calls that do no harm twice
  never       anything else, including a timeout after sending: the time given was used up
"""

from __future__ import annotations

import asyncio
import numbers
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

from attnd.calls.call import Call, Reply, Settled, parsed
from attnd.calls.prefix import salt
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

MAX_TIMEOUT_S: Final = 1e6
"""Of an attempt: the system's own waits take no more than some weeks."""


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `attempts` retries; waits double from `first_wait_s` to `max_wait_s`, with jitter.

    `Retry-After` is obeyed up to `max_wait_s` seconds. A service that asks for a longer wait gets
    no retry, and the call raises its error.
    """

    attempts: int = 2
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0

    def wait_s(self, attempt: int, error: AttndError) -> float | None:
        """Seconds to wait before retry number `attempt` (from 1); None: no further retry."""
        if attempt > self.attempts:
            return None
        retry_after_s = error.retry_after_s if isinstance(error, ServiceError) else None
        if retry_after_s is not None:
            return retry_after_s if retry_after_s <= self.max_wait_s else None
        wait_s = min(self.max_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))
        return wait_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of all calls. `timeout_s` bounds one attempt, `deadline_s` a call with its retries;
    `request_id` None: one is made for each call. `cache_salt` is that of prefixes without one."""

    timeout_s: float = 30.0
    deadline_s: float | None = None
    retries: Retries = Retries()
    request_id: str | None = None
    cache_salt: str = ""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Attempt(Generic[T]):
    """Send this call once; returns the reply, or raises an `AttndError`.

    `deadline_s` seconds are left of the call's deadline, which the service is sent and which passes
    at `ends` by `time.monotonic`.
    """

    call: Call[T]
    request_id: str
    timeout_s: float
    deadline_s: float | None = None
    ends: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Sleep."""

    seconds: float

    def sleep(self) -> Any:
        time.sleep(self.seconds)


Steps = Generator[Call[Any] | Pause, Any, T]
"""Calls to be executed one after another; each is sent its result, or thrown its `AttndError`."""
CallOrSteps = Call[T] | Steps[T]


def driven(steps: Generator[Any, Any, T], send: Callable[[Any], Any]) -> T:
    """The result of steps that `send` carries out one by one, but for pauses; its `AttndError` is
    raised in them."""
    go_on: Callable[[Any], Any] = steps.send
    given: Any = None
    try:
        while True:
            step = go_on(given)
            try:
                given = step.sleep() if isinstance(step, Pause) else send(step)
                go_on = steps.send
            except AttndError as error:
                go_on, given = steps.throw, error
    except StopIteration as stop:
        return cast(T, stop.value)
    finally:
        steps.close()
        del given  # an error's traceback refers to this frame


async def driven_async(
    steps: Generator[Any, Any, T], send: Callable[[Any], Awaitable[Any]], *, in_thread: bool = False
) -> T:
    """`driven`, awaited; `in_thread`: the steps themselves may block."""
    go_on: Callable[[Any], Any] = steps.send
    given: Any = None

    def advance() -> tuple[Any, bool]:
        try:
            return go_on(given), False
        except StopIteration as stop:  # which a future must not raise
            return stop.value, True

    try:
        while True:
            step, is_over = (
                await uninterrupted(asyncio.to_thread(advance)) if in_thread else advance()
            )
            if is_over:
                return cast(T, step)
            try:
                acted = asyncio.sleep(step.seconds) if isinstance(step, Pause) else send(step)
                go_on, given = steps.send, await acted
            except AttndError as error:
                go_on, given = steps.throw, error
    finally:
        steps.close()
        given = None


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await the work of a thread; where this is cancelled, its end too."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))


def first_attempt(call: Call[T], options: CallOptions) -> Attempt[T]:
    """The first attempt; raises `TimedOut` for a deadline that has passed already."""
    request_id = options.request_id or os.urandom(16).hex()
    if options.cache_salt:
        salt(call, options.cache_salt)
    if options.deadline_s is None:
        return Attempt(call, request_id, options.timeout_s)
    return attempt_before(call, request_id, options, time.monotonic() + options.deadline_s)


def attempt_before(
    call: Call[T], request_id: str, options: CallOptions, ends: float | None
) -> Attempt[T]:
    """An attempt in the time left until `ends`; raises `TimedOut` when none is left."""
    if ends is None:
        return Attempt(call, request_id, options.timeout_s)
    left = ends - time.monotonic()
    if left <= 0:
        raise TimedOut(f"the deadline of {options.deadline_s} s passed", request_id)
    return Attempt(call, request_id, min(options.timeout_s, left), left, ends)


def remaining(ends: float) -> float:
    """Seconds until `ends`; raises TimeoutError when there are none."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is up")
    return left


def retrying(
    failed: Attempt[T], error: AttndError, options: CallOptions
) -> Generator[Attempt[Any] | Pause, Any, T]:
    """Drive a call whose first attempt failed to its result; raises `AttndError`.

    `done` in the error's problem has what all attempts have changed. Its `__cause__` is the error
    of an earlier attempt that may have been executed, or else was executed in part, if any.
    """
    call, request_id, ends = failed.call, failed.request_id, failed.ends
    attempt, lost, done = 0, False, dict[str, None]()
    unknown: ReplyLost | None = None  # of the first attempt that may have been executed
    partial: ServiceError | None = None  # of the latest attempt that was executed in part
    try:
        while True:
            error.request_id = error.request_id or request_id
            recovery = None
            if isinstance(error, ServiceError):
                done |= dict.fromkeys(error.problem.get("done", ()))
                if done:
                    partial, error.problem["done"] = error, list(done)
                every = call.fields.get("sequences", ()) if call.repeatable else ()
                if lost or (done and done.keys() >= {*every}):
                    recovery = call.recover(error)
            if isinstance(recovery, Settled):
                return recovery.value
            if recovery is not None:
                call, lost = recovery, False
            else:
                if (
                    ends is not None
                    and isinstance(error, ConnectionFailed)
                    and time.monotonic() >= ends
                ):
                    detail = f"the deadline of {options.deadline_s} s passed: {error}"
                    raise TimedOut(detail, error.request_id) from error
                if isinstance(error, ReplyLost):
                    lost, unknown = True, unknown or error
                attempt += 1
                wait = options.retries.wait_s(attempt, error) if may_repeat(call, error) else None
                if wait is None or (ends is not None and time.monotonic() + wait >= ends):
                    earlier = unknown or partial
                    if earlier is None or earlier is error:
                        raise error
                    raise error from earlier
                yield Pause(wait)
            again = attempt_before(call, request_id, options, ends)
            try:
                return parsed(call.parse, (yield again))
            except AttndError as raised:
                error = raised
    finally:
        del error, unknown, partial  # an error's traceback refers to this frame


def may_repeat(call: Call[T], error: AttndError) -> bool:
    """Whether sending `call` again after `error` is safe, and could help.

    `done` in an error of a cluster lists sequences that were changed all the same.
    """
    if isinstance(error, ServiceError) and error.problem.get("done") and not call.repeatable:
        return False
    if isinstance(error, (ConnectionFailed, Overloaded, NotReady)):
        return True
    return isinstance(error, ReplyLost) and call.repeatable


def options_for(call: Call[T], options: CallOptions) -> CallOptions:
    """With the earlier of the caller's deadline and the call's own."""
    within_s, deadline_s = call.within_s, options.deadline_s
    if within_s is None or (deadline_s is not None and deadline_s <= within_s):
        return options
    return replace(options, deadline_s=within_s)


def execute(call: Call[T], options: CallOptions, send: Callable[[Attempt[Any]], Reply]) -> T:
    """Execute a call by attempts that block; raises `AttndError`."""
    options = options_for(call, options)
    attempt = first_attempt(call, options)
    try:
        return parsed(call.parse, send(attempt))
    except AttndError as error:
        return driven(retrying(attempt, error, options), send)


async def execute_async(
    call: Call[T], options: CallOptions, send: Callable[[Attempt[Any]], Awaitable[Reply]]
) -> T:
    """`execute`, awaited."""
    options = options_for(call, options)
    attempt = first_attempt(call, options)
    try:
        return parsed(call.parse, await send(attempt))
    except AttndError as error:
        steps = retrying(attempt, error, options)
    return await driven_async(steps, send)


def options_of(timeout: float, retries: int | Retries) -> CallOptions:
    """The options that a client's arguments ask for; raises ValueError and TypeError."""
    if not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}: it must be seconds, more than 0")
    if isinstance(retries, numbers.Integral):
        retries = Retries(int(retries))
    if not isinstance(retries, Retries):
        raise TypeError(f"retries is {retries!r}: it must be a number of them, or attnd.Retries")
    return CallOptions(min(float(timeout), MAX_TIMEOUT_S), retries=retries)
