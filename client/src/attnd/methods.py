"""The methods of all clients: blocking ones in `Calls`, awaited ones in `AsyncCalls`.

Each operation is declared once, in `Operations`, by the function that builds its call (or its
steps) and documents the method.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, get_args, get_type_hints, overload

from attnd import splitting
from attnd.calls import attention, control, prefix, records, transfer
from attnd.calls.arguments import Int
from attnd.calls.call import Call
from attnd.calls.prefix import FROM_NOW
from attnd.errors import DeadlineExceeded, NeverReady, TransportError
from attnd.moving import export, import_
from attnd.results import CacheEvent, Health, SequenceInfo
from attnd.retries import CallOptions, Pause, Steps, driven, driven_async

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])

POLL_S: Final = 0.05
"""Seconds between two questions for readiness, or for new events."""

LAST_S: Final = 0.5
"""Seconds for an answer where the time for `wait_ready` is nearly up."""


class Unquoted(str):
    """An annotation that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def documented(method: M, build: Callable[..., Any]) -> M:
    """`method` with the signature of `build` as a method, for `help()` and editors: it returns what
    the call or the steps of `build` result in."""
    signature = inspect.signature(build)
    returned = str(signature.return_annotation).partition("[")[2].removesuffix("]")
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            parameters += option_parameters(build)
        else:
            parameters.append(one.replace(annotation=Unquoted(one.annotation)))
    shown = inspect.Signature(parameters, return_annotation=Unquoted(returned))
    method.__signature__ = shown  # type: ignore[attr-defined]
    method.__annotations__ = {**build.__annotations__, "return": returned}
    return method


def option_parameters(build: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keywords in `**options` of a call; the service has a default for each."""
    (options,) = get_args(get_type_hints(build)["options"])
    kinds = {
        name: kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        for name, kind in get_type_hints(options).items()
    }
    keyword, default = inspect.Parameter.KEYWORD_ONLY, Unquoted("...")
    return [
        inspect.Parameter(name, keyword, default=default, annotation=Unquoted(kind))
        for name, kind in kinds.items()
    ]


def blocking(build: Callable[..., Any]) -> Callable[..., Any]:
    """A method that builds a call or steps, and executes them."""

    @wraps(build)
    def method(self: Calls, /, *args: Any, **kwargs: Any) -> Any:
        made = build(*args, **kwargs)
        return self.send(made) if type(made) is Call else driven(made, self.send)

    return documented(method, build)


def awaiting(build: Callable[..., Any]) -> Callable[..., Any]:
    """As `blocking`, awaited. Steps read and write their files in a thread."""

    @wraps(build)
    async def method(self: AsyncCalls, /, *args: Any, **kwargs: Any) -> Any:
        made = build(*args, **kwargs)
        if type(made) is Call:
            return await self.send(made)
        return await driven_async(made, self.send, in_thread=True)

    return documented(method, build)


class Operation(Generic[P, T]):
    """A method of all clients, by the function that builds its call or steps; `Calls` and
    `AsyncCalls` each make their own function of it."""

    def __init__(self, build: Callable[P, Call[T] | Steps[T]]) -> None:
        self.build = build

    @overload
    def __get__(self, client: Calls, owner: object) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncCalls, owner: object) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: object) -> Callable[..., Any]: ...
    def __get__(self, client: object, owner: object) -> Any:
        raise NotImplementedError("subclasses of Operations replace this")


def until_ready(timeout: float = 60.0) -> Steps[None]:
    """Return once the service is ready; raises `NeverReady` with the service's reason."""
    ends = time.monotonic() + timeout
    while True:
        try:
            left = max(ends - time.monotonic(), LAST_S)
            health: Health = yield replace(control.ready(), within_s=left)
        except (TransportError, DeadlineExceeded) as error:
            health = Health(False, str(error))
        if health.ok:
            return
        if time.monotonic() >= ends:
            remedy = "wait longer (timeout), or see the service's log"
            raise NeverReady(f"not ready after {timeout} s: {health.reason}: {remedy}")
        yield Pause(POLL_S)


class Operations(ABC):
    """A client with options for its calls, and its operations."""

    _options: CallOptions

    def __init_subclass__(cls, make: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """`make` makes a method from the function that builds an operation."""
        super().__init_subclass__(**kwargs)
        for name, one in vars(Operations).items():
            if make is not None and isinstance(one, Operation) and name not in vars(cls):
                method = make(one.build)
                method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
                setattr(cls, name, method)

    def with_options(
        self,
        *,
        deadline: float | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Self:
        """The same client and connections, with other options for its calls.

        `deadline` bounds each call in seconds, retries included, and is sent to the service; None
        and infinity are no bound.
        `request_id` is sent as `X-Request-ID` in place of one made per call; it must be printable
        ASCII (ValueError). `cache_salt` is that of every `Prefix` and page key that has none of its
        own; None keeps the present one.
        """
        if request_id is not None and not (request_id.isascii() and request_id.isprintable()):
            raise ValueError(f"request_id is {request_id!r}: it must be printable ASCII")
        if deadline is not None and not -math.inf < deadline < math.inf:
            if deadline != math.inf:
                raise ValueError(f"deadline is {deadline}: it must be seconds, or None")
            deadline = None
        view, salt = copy(self), self._options.cache_salt if cache_salt is None else cache_salt
        view._options = replace(
            self._options, deadline_s=deadline, request_id=request_id, cache_salt=salt
        )
        return view

    create_sequences = Operation(control.create_sequences)
    create_sequence = Operation(control.create_sequence)
    get_sequence = Operation(control.get_sequence)
    sequence_page = Operation(control.sequence_page)
    delete_sequence = Operation(control.delete_sequence)
    delete_sequences = Operation(splitting.delete_sequences)
    truncate = Operation(control.truncate)
    truncate_sequences = Operation(control.truncate_sequences)
    page_table = Operation(control.page_table)
    append = Operation(attention.append)
    decode = Operation(attention.decode)
    prefill = Operation(attention.prefill)
    ragged_prefill = Operation(attention.ragged_prefill)
    cascade = Operation(attention.cascade)
    merge = Operation(attention.merge)
    gather = Operation(attention.gather)
    match_prefix = Operation(prefix.match_prefix)
    prefetch = Operation(prefix.prefetch)
    commit = Operation(splitting.commit)
    commit_sequences = Operation(prefix.commit_sequences)
    renew_lease = Operation(prefix.renew_lease)
    release_lease = Operation(prefix.release_lease)
    pin = Operation(prefix.pin)
    unpin = Operation(prefix.unpin)
    holds = Operation(prefix.holds)
    evict = Operation(prefix.evict)
    clear = Operation(prefix.clear)
    get_namespace = Operation(prefix.get_namespace)
    set_namespace = Operation(prefix.set_namespace)
    event_page = Operation(prefix.event_page)
    contains_records = Operation(records.contains_records)
    put_records = Operation(records.put_records)
    get_records = Operation(records.get_records)
    touch_records = Operation(records.touch_records)
    delete_records = Operation(records.delete_records)
    clear_records = Operation(records.clear_records)
    release_records = Operation(records.release_records)
    export_header = Operation(transfer.export_header)
    export_part = Operation(transfer.export_part)
    begin_import = Operation(transfer.begin_import)
    import_part = Operation(transfer.import_part)
    end_import = Operation(transfer.end_import)
    get_import = Operation(transfer.get_import)
    cancel_import = Operation(transfer.cancel_import)
    export = Operation(export)
    import_ = Operation(import_)
    info = Operation(control.info)
    pool = Operation(control.pool)
    engines = Operation(control.engines)
    drain_engine = Operation(control.drain_engine)
    snapshot = Operation(control.snapshot)
    live = Operation(control.live)
    ready = Operation(control.ready)
    metrics = Operation(control.metrics)
    wait_ready = Operation(until_ready)


class Calls(Operations, make=blocking):
    """The methods that `Client` and `Session` share."""

    @abstractmethod
    def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""

    def _for_thread(self) -> Self:
        """A view for calls of the present thread."""
        return self

    def list_sequences(self, *, page_size: Int | None = None) -> Iterator[SequenceInfo]:
        """Every sequence by id, fetched `page_size` at a time (None: the service's default)."""
        after: str | None = None
        while True:
            page = self.sequence_page(after, page_size)
            yield from page.sequences
            if (after := page.next) is None:
                return

    def events(self, after: Int = FROM_NOW, *, poll_s: float = POLL_S) -> Iterator[CacheEvent]:
        """Changes of cached pages, without end; see `event_page` for `after`.

        Asks every `poll_s` seconds while there are no new events. Raises the errors of a call.
        """
        while True:
            page = self.event_page(after)
            after = page.next
            yield from page.all_events
            if not page.events:
                time.sleep(poll_s)


class AsyncCalls(Operations, make=awaiting):
    """The methods of `Calls`, awaited."""

    @abstractmethod
    async def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""

    async def list_sequences(self, *, page_size: Int | None = None) -> AsyncIterator[SequenceInfo]:
        """As `Client.list_sequences`."""
        after: str | None = None
        while True:
            page = await self.sequence_page(after, page_size)
            for sequence in page.sequences:
                yield sequence
            if (after := page.next) is None:
                return

    async def events(
        self, after: Int = FROM_NOW, *, poll_s: float = POLL_S
    ) -> AsyncIterator[CacheEvent]:
        """As `Client.events`."""
        while True:
            page = await self.event_page(after)
            after = page.next
            for event in page.all_events:
                yield event
            if not page.events:
                await asyncio.sleep(poll_s)
