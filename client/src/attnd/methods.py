"""The methods of all clients: blocking ones in `Calls`, awaited ones in `AsyncCalls`.

Each is made from the function in `attnd.calls` that builds the call and documents the method.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, get_args, get_type_hints

from attnd.calls import attention, control, prefix, transfer
from attnd.calls.call import Call, Reply
from attnd.calls.prefix import FROM_NOW
from attnd.errors import AttndError, NeverReady, TransportError
from attnd.moving import export, export_async, import_, import_async
from attnd.results import CacheEvent, Health, SequenceInfo
from attnd.retries import (
    Attempt,
    CallOptions,
    Pause,
    Retries,
    acting,
    acting_async,
    driven,
    driven_async,
    first_attempt,
    retrying,
)

M = TypeVar("M", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

POLL_S: Final = 0.05
"""Seconds between two questions for readiness, or for new events."""


def documented(method: M, build: Callable[..., Any]) -> M:
    """`method` with the signature of `build` as a method, for `help()` and editors: it returns what
    the call of `build` parses."""
    signature = inspect.signature(build)
    returned = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            parameters += option_parameters(build)
        else:
            parameters.append(one.replace(annotation=Unquoted(one.annotation)))
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=Unquoted(returned)
    )
    method.__annotations__ = {**build.__annotations__, "return": returned}
    return method


def option_parameters(build: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keywords in `**options` of a call; the service has a default for each."""
    (options,) = get_args(get_type_hints(build)["options"])
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=Unquoted("..."),
            annotation=Unquoted(
                kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            ),
        )
        for name, kind in get_type_hints(options).items()
    ]


class Unquoted(str):
    """An annotation that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that builds a call and executes it."""

    @wraps(build)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.send(build(*args, **kwargs))
        return result

    return documented(method, build)


def awaiting(build: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """As `blocking`, awaited."""

    @wraps(build)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self.send(build(*args, **kwargs))
        return result

    return documented(method, build)


class WithOptions(ABC):
    """A client with options for its calls."""

    _options: CallOptions

    def with_options(self, *, deadline: float | None = None, request_id: str | None = None) -> Self:
        """The same client and connections, with other options for its calls.

        `deadline` bounds each call in seconds, retries included, and is sent to the service.
        `request_id` is sent as `X-Request-ID` in place of one made per call; it must be printable
        ASCII (ValueError).
        """
        if request_id is not None and not (request_id.isascii() and request_id.isprintable()):
            raise ValueError(f"request_id is {request_id!r}: it must be printable ASCII")
        view = copy(self)
        view._options = replace(self._options, deadline_s=deadline, request_id=request_id)
        return view


class Calls(WithOptions):
    """The methods that `Client` and `Session` share."""

    @abstractmethod
    def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""

    create_sequences = blocking(control.create_sequences)
    create_sequence = blocking(control.create_sequence)
    get_sequence = blocking(control.get_sequence)
    sequence_page = blocking(control.sequence_page)
    delete_sequence = blocking(control.delete_sequence)
    delete_sequences = blocking(control.delete_sequences)
    truncate = blocking(control.truncate)
    truncate_sequences = blocking(control.truncate_sequences)
    page_table = blocking(control.page_table)
    append = blocking(attention.append)
    decode = blocking(attention.decode)
    prefill = blocking(attention.prefill)
    ragged_prefill = blocking(attention.ragged_prefill)
    cascade = blocking(attention.cascade)
    merge = blocking(attention.merge)
    gather = blocking(attention.gather)
    match_prefix = blocking(prefix.match_prefix)
    commit = blocking(prefix.commit)
    commit_sequences = blocking(prefix.commit_sequences)
    renew_lease = blocking(prefix.renew_lease)
    release_lease = blocking(prefix.release_lease)
    pin = blocking(prefix.pin)
    unpin = blocking(prefix.unpin)
    holds = blocking(prefix.holds)
    evict = blocking(prefix.evict)
    clear = blocking(prefix.clear)
    get_namespace = blocking(prefix.get_namespace)
    set_namespace = blocking(prefix.set_namespace)
    event_page = blocking(prefix.event_page)
    export_header = blocking(transfer.export_header)
    export_part = blocking(transfer.export_part)
    begin_import = blocking(transfer.begin_import)
    import_part = blocking(transfer.import_part)
    end_import = blocking(transfer.end_import)
    get_import = blocking(transfer.get_import)
    cancel_import = blocking(transfer.cancel_import)
    export = export
    import_ = import_
    info = blocking(control.info)
    pool = blocking(control.pool)
    engines = blocking(control.engines)
    drain_engine = blocking(control.drain_engine)
    snapshot = blocking(control.snapshot)
    live = blocking(control.live)
    ready = blocking(control.ready)
    metrics = blocking(control.metrics)

    def list_sequences(self, *, page_size: int | None = None) -> Iterator[SequenceInfo]:
        """Every sequence by id, fetched `page_size` at a time (None: the service's default)."""
        after: str | None = None
        while True:
            page = self.sequence_page(after, page_size)
            yield from page.sequences
            if (after := page.next) is None:
                return

    def events(self, after: int = FROM_NOW, *, poll_s: float = POLL_S) -> Iterator[CacheEvent]:
        """Changes of cached pages, without end; see `event_page` for `after`.

        Asks every `poll_s` seconds while there are no new events. Raises the errors of a call.
        """
        while True:
            page = self.event_page(after)
            after = page.next
            yield from page.all_events
            if not page.events:
                time.sleep(poll_s)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the service is ready; raises `NeverReady` with the service's reason."""
        driven(until_ready(timeout), acting(self.send))


class AsyncCalls(WithOptions):
    """The methods of `Calls`, awaited."""

    @abstractmethod
    async def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""

    create_sequences = awaiting(control.create_sequences)
    create_sequence = awaiting(control.create_sequence)
    get_sequence = awaiting(control.get_sequence)
    sequence_page = awaiting(control.sequence_page)
    delete_sequence = awaiting(control.delete_sequence)
    delete_sequences = awaiting(control.delete_sequences)
    truncate = awaiting(control.truncate)
    truncate_sequences = awaiting(control.truncate_sequences)
    page_table = awaiting(control.page_table)
    append = awaiting(attention.append)
    decode = awaiting(attention.decode)
    prefill = awaiting(attention.prefill)
    ragged_prefill = awaiting(attention.ragged_prefill)
    cascade = awaiting(attention.cascade)
    merge = awaiting(attention.merge)
    gather = awaiting(attention.gather)
    match_prefix = awaiting(prefix.match_prefix)
    commit = awaiting(prefix.commit)
    commit_sequences = awaiting(prefix.commit_sequences)
    renew_lease = awaiting(prefix.renew_lease)
    release_lease = awaiting(prefix.release_lease)
    pin = awaiting(prefix.pin)
    unpin = awaiting(prefix.unpin)
    holds = awaiting(prefix.holds)
    evict = awaiting(prefix.evict)
    clear = awaiting(prefix.clear)
    get_namespace = awaiting(prefix.get_namespace)
    set_namespace = awaiting(prefix.set_namespace)
    event_page = awaiting(prefix.event_page)
    export_header = awaiting(transfer.export_header)
    export_part = awaiting(transfer.export_part)
    begin_import = awaiting(transfer.begin_import)
    import_part = awaiting(transfer.import_part)
    end_import = awaiting(transfer.end_import)
    get_import = awaiting(transfer.get_import)
    cancel_import = awaiting(transfer.cancel_import)
    export = export_async
    import_ = import_async
    info = awaiting(control.info)
    pool = awaiting(control.pool)
    engines = awaiting(control.engines)
    drain_engine = awaiting(control.drain_engine)
    snapshot = awaiting(control.snapshot)
    live = awaiting(control.live)
    ready = awaiting(control.ready)
    metrics = awaiting(control.metrics)

    async def list_sequences(self, *, page_size: int | None = None) -> AsyncIterator[SequenceInfo]:
        """Every sequence by id, fetched `page_size` at a time (None: the service's default)."""
        after: str | None = None
        while True:
            page = await self.sequence_page(after, page_size)
            for sequence in page.sequences:
                yield sequence
            if (after := page.next) is None:
                return

    async def events(
        self, after: int = FROM_NOW, *, poll_s: float = POLL_S
    ) -> AsyncIterator[CacheEvent]:
        """As `Client.events`."""
        while True:
            page = await self.event_page(after)
            after = page.next
            for event in page.all_events:
                yield event
            if not page.events:
                await asyncio.sleep(poll_s)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the service is ready; raises `NeverReady` with the service's reason."""
        await driven_async(until_ready(timeout), acting_async(self.send))


def until_ready(timeout: float) -> Generator[Call[Health] | Pause, Any, None]:
    """Ask until the service is ready; raises `NeverReady` after `timeout` seconds."""
    ends = time.monotonic() + timeout
    while True:
        try:
            health: Health = yield control.ready()
        except TransportError as error:
            health = Health(False, str(error))
        if health.ok:
            return
        if time.monotonic() >= ends:
            remedy = "wait longer (timeout), or see the service's log"
            raise NeverReady(f"not ready after {timeout} s: {health.reason}: {remedy}")
        yield Pause(POLL_S)


def execute(call: Call[T], options: CallOptions, send: Callable[[Attempt[Any]], Reply]) -> T:
    """Execute a call by attempts that block; raises `AttndError`."""
    attempt = first_attempt(call, options)
    try:
        return call.parse(send(attempt))
    except AttndError as error:
        return retry(attempt, error, options, send)


def retry(
    failed: Attempt[T],
    error: AttndError,
    options: CallOptions,
    send: Callable[[Attempt[Any]], Reply],
) -> T:
    """The result of a call whose first attempt failed with `error`; raises `AttndError`."""
    try:
        return driven(retrying(failed, error, options), acting(send))
    finally:
        del error  # an error's traceback refers to this frame


def options_of(timeout: float, retries: int | Retries) -> CallOptions:
    """The options that a client's arguments ask for."""
    return CallOptions(timeout, retries=Retries(retries) if isinstance(retries, int) else retries)
