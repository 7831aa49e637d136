"""What the clients' methods share: how one is made from a call, carried out, and readiness."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import (
    Any,
    Concatenate,
    Final,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

from attnd.calls.call import Call, Reply
from attnd.errors import AttndError, NeverReady, TransportError
from attnd.results import CacheEvent, EventPage, Health, SequenceInfo, SequencePage
from attnd.retries import Manner, Outcome, Retries, Send, Wait, first, repeated

M = TypeVar("M", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

POLL_S: Final = 0.05
"""Between two questions whether the service is ready yet."""


def with_self(method: M, build: Callable[..., Any]) -> M:
    """`method` with the signature of `build` as a method, for `help()` and editors: it returns what
    the call of `build` parses."""
    signature = inspect.signature(build)
    returned = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for one in signature.parameters.values():
        parameters += shown_options(build) if one.kind is one.VAR_KEYWORD else [shown(one)]
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=Shown(returned)
    )
    method.__annotations__ = {**build.__annotations__, "return": returned}
    return method


def shown(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=Shown(parameter.annotation))


def shown_options(build: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keywords that `**options` of a call stand for; what is not given is the service's."""
    (options,) = get_args(get_type_hints(build)["options"])
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=Shown("..."),
            annotation=Shown(kind.__name__ if isinstance(kind, type) else kind_text(kind)),
        )
        for name, kind in get_type_hints(options).items()
    ]


def kind_text(kind: object) -> str:
    return str(kind).replace("typing.", "")


class Shown(str):
    """An annotation that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def repeating(build: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """A method of a blocking client that makes a call and sends it; one that was made before goes a
    shorter way, by the client's `_again`."""

    @wraps(build)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        manner, repeats = self._manner, self._repeats
        key = repeats.key_of(build, args, kwargs) if manner.is_plain else None
        repeat = repeats.known.get(key) if key is not None else None
        if repeat is not None:
            request_id = os.urandom(16)
            try:
                result = self._again(repeat, args, kwargs, request_id)
            except AttndError as error:
                tried = Send(build(*args, **kwargs), request_id.hex(), manner.timeout_s)
                return go_on(tried, error, manner, self._attempt)
            if result is not None:
                return cast(T, result)
        call = build(*args, **kwargs)
        answer: T = self.send(call)
        if key is not None:
            repeats.remember(key, call, args, kwargs)
        return answer

    return with_self(method, build)


def carry_out(call: Call[T], manner: Manner, attempt: Callable[[Send[Any]], Reply]) -> T:
    """Make a call by attempts that block; raises `AttndError`."""
    tried = first(call, manner)
    try:
        return call.parse(attempt(tried))
    except AttndError as error:
        return go_on(tried, error, manner, attempt)


def go_on(
    tried: Send[T], error: AttndError, manner: Manner, attempt: Callable[[Send[Any]], Reply]
) -> T:
    """What comes of a call whose first attempt ended in `error`; raises `AttndError`."""
    steps = repeated(tried, error, manner)
    outcome: Outcome = None
    try:
        while True:
            step = steps.send(outcome)
            if isinstance(step, Wait):
                time.sleep(step.seconds)
                outcome = None
                continue
            try:
                outcome = attempt(step)
            except AttndError as error:
                outcome = error
    except StopIteration as stop:
        return cast(T, stop.value)
    finally:
        del outcome  # an error's traceback leads to this frame


def every_sequence(
    page_of: Callable[[str | None, int | None], SequencePage], page_size: int | None
) -> Iterator[SequenceInfo]:
    """Every sequence by id, fetched a page at a time with `page_of(after, limit)`."""
    after: str | None = None
    while True:
        page = page_of(after, page_size)
        yield from page.sequences
        if (after := page.next) is None:
            return


def every_event(
    page_of: Callable[[int], EventPage], after: int, poll_s: float
) -> Iterator[CacheEvent]:
    """Event after event, asked for with `page_of(after)`, every `poll_s` while there are none."""
    while True:
        page = page_of(after)
        after = page.next
        yield from page.told
        if not page.events:
            time.sleep(poll_s)


def wait_until_ready(ready: Callable[[], Health], timeout: float) -> None:
    """Ask until the answer is yes; raises `NeverReady` with the service's own reason."""
    ends = time.monotonic() + timeout
    while True:
        try:
            health = ready()
        except TransportError as error:
            health = unreachable(error)
        if health.ok:
            return
        if time.monotonic() >= ends:
            raise not_ready(timeout, health)
        time.sleep(POLL_S)


def manner(timeout: float, retries: int | Retries) -> Manner:
    return Manner(timeout, retries=Retries(retries) if isinstance(retries, int) else retries)


def checked(request_id: str | None) -> str | None:
    """A request id that can be a header; raises ValueError for another."""
    if request_id is not None and not (request_id.isascii() and request_id.isprintable()):
        raise ValueError(f"request_id is {request_id!r}: it must be printable ASCII")
    return request_id


def unreachable(error: TransportError) -> Health:
    return Health(False, str(error))


def not_ready(timeout: float, health: Health) -> NeverReady:
    remedy = "wait longer (timeout), or see the service's log"
    return NeverReady(f"not ready after {timeout} s: {health.reason}: {remedy}")
