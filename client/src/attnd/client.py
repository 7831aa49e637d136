"""`Client` and `AsyncClient`: a connection pool, and one method per route.

The methods are made from the calls of `control` and `attention`, where their documentation is, and
carried out by the steps of `exchange`; what is left here is input and output.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from attnd import moving
from attnd.calls import attention, control, prefix, transfer
from attnd.calls.call import Call, Reply
from attnd.calls.prefix import FROM_NOW
from attnd.dependents import Users
from attnd.errors import AttndError, TransportError
from attnd.http.async_transport import AsyncTransport, LoopTransport
from attnd.http.blocking_transport import SocketTransport, Transport
from attnd.http.messages import reply_of, request_of
from attnd.http.origin import Certificate, Verify, origin_of
from attnd.http.replay import HttpRepeat, add_array
from attnd.methods import (
    POLL_S,
    carry_out,
    checked,
    every_event,
    every_sequence,
    manner,
    not_ready,
    repeating,
    unreachable,
    wait_until_ready,
    with_self,
)
from attnd.replay import Args, Kwargs, Repeats
from attnd.results import CacheEvent, SequenceInfo
from attnd.retries import Outcome, Retries, Send, Wait, first, repeated

P = ParamSpec("P")
T = TypeVar("T")


def blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method of `Client` that makes a call and sends it."""

    @wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return with_self(method, build)


def awaiting(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    """A method of `AsyncClient` that makes a call and sends it."""

    @wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(build(*args, **kwargs))

    return with_self(method, build)


def awaiting_again(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    """As `awaiting`, for calls that repeat themselves: `methods.repeating`, awaited."""

    @wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        manner, repeats = self._manner, self._repeats
        key = repeats.key_of(build, args, kwargs) if manner.is_plain else None
        repeat = repeats.known.get(key) if key is not None else None
        if repeat is not None:
            name = os.urandom(16).hex()
            request = repeat.request(args, kwargs, name, manner.timeout_s)
            try:
                return cast(T, repeat.result(await self._transport.send(request), name))
            except AttndError as error:
                return await self._go_on(
                    Send(build(*args, **kwargs), name, manner.timeout_s), error
                )
        call = build(*args, **kwargs)
        answer = await self.send(call)
        if key is not None:
            repeats.remember(key, call, args, kwargs)
        return answer

    return with_self(method, build)


class Client:
    """A blocking client; may be shared by threads. Close it, or use it as a context manager.

    `base_url` like `http://127.0.0.1:8080`, or `uds` the path of the service's Unix socket.
    `api_key` is the caller's key, where the service has keys. Over https, `verify` is a PEM file of
    authorities in place of the system's (or an `ssl.SSLContext`; False trusts anybody), and `cert`
    a PEM file, or (certificate, key), for a service that asks clients for theirs.
    `timeout` bounds one attempt in seconds; `retries` says how often and how long to try again
    where that is safe (see `attnd.retries`). `transport` replaces the connections, for tests.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        uds: str | None = None,
        api_key: str | None = None,
        verify: Verify = True,
        cert: Certificate = None,
        timeout: float = 30.0,
        retries: int | Retries = 2,
        transport: Transport | None = None,
    ) -> None:
        self._manner = manner(timeout, retries)
        self._repeats: Repeats[HttpRepeat[Any]] = Repeats(add_array, HttpRepeat)
        self.users = Users()
        """What ends before the client does."""
        self._transport: Transport = transport or SocketTransport(
            origin_of(base_url, uds, api_key, verify, cert)
        )

    create_sequences = blocking(control.create_sequences)
    create_sequence = blocking(control.create_sequence)
    get_sequence = blocking(control.get_sequence)
    sequence_page = blocking(control.sequence_page)
    delete_sequence = blocking(control.delete_sequence)
    truncate = blocking(control.truncate)
    truncate_sequences = blocking(control.truncate_sequences)
    page_table = blocking(control.page_table)
    append = repeating(attention.append)
    decode = repeating(attention.decode)
    prefill = repeating(attention.prefill)
    ragged_prefill = blocking(attention.ragged_prefill)
    cascade = blocking(attention.cascade)
    merge = blocking(attention.merge)
    gather = blocking(attention.gather)
    delete_sequences = blocking(control.delete_sequences)
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
    export = moving.export
    import_ = moving.import_
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
        return every_sequence(self.sequence_page, page_size)

    def events(self, after: int = FROM_NOW, *, poll_s: float = POLL_S) -> Iterator[CacheEvent]:
        """What becomes of cached pages, without end; see `event_page` for `after`.

        Asks every `poll_s` seconds while there is nothing new. Raises what a call raises.
        """
        return every_event(self.event_page, after, poll_s)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the service is ready; raises `NeverReady` with its own reason."""
        wait_until_ready(self.ready, timeout)

    def with_options(self, *, deadline: float | None = None, request_id: str | None = None) -> Self:
        """The same client and connections, for calls that differ.

        `deadline` bounds each call in seconds, retries included, and is told to the service.
        `request_id` is sent as `X-Request-ID` in place of one made per call.
        """
        view = object.__new__(type(self))
        view._transport = self._transport
        view.users = self.users
        view._repeats = self._repeats
        view._manner = replace(self._manner, deadline_s=deadline, request_id=checked(request_id))
        return view

    def send(self, call: Call[T]) -> T:
        """Carry out one call."""
        return carry_out(call, self._manner, self._attempt)

    def _again(self, repeat: HttpRepeat[T], args: Args, kwargs: Kwargs, name: bytes) -> T:
        """A call that was made before, under the request id `name`."""
        request_id = name.hex()
        request = repeat.request(args, kwargs, request_id, self._manner.timeout_s)
        return repeat.result(self._transport.send(request), request_id)

    def _attempt(self, step: Send[Any]) -> Reply:
        request = request_of(step.call, step.request_id, step.timeout_s, step.deadline_s)
        return reply_of(self._transport.send(request), step.request_id, step.call)

    def close(self) -> None:
        """Close the connections, of every `with_options` view too.

        Caches of transformers on it delete their sequences first.
        """
        self.users.end()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The asyncio client: the methods, arguments and answers of `Client`, awaited."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        uds: str | None = None,
        api_key: str | None = None,
        verify: Verify = True,
        cert: Certificate = None,
        timeout: float = 30.0,
        retries: int | Retries = 2,
        transport: AsyncTransport | None = None,
    ) -> None:
        self._manner = manner(timeout, retries)
        self._repeats: Repeats[HttpRepeat[Any]] = Repeats(add_array, HttpRepeat)
        self._transport: AsyncTransport = transport or LoopTransport(
            origin_of(base_url, uds, api_key, verify, cert)
        )

    create_sequences = awaiting(control.create_sequences)
    create_sequence = awaiting(control.create_sequence)
    get_sequence = awaiting(control.get_sequence)
    sequence_page = awaiting(control.sequence_page)
    delete_sequence = awaiting(control.delete_sequence)
    truncate = awaiting(control.truncate)
    truncate_sequences = awaiting(control.truncate_sequences)
    page_table = awaiting(control.page_table)
    append = awaiting_again(attention.append)
    decode = awaiting_again(attention.decode)
    prefill = awaiting_again(attention.prefill)
    ragged_prefill = awaiting(attention.ragged_prefill)
    cascade = awaiting(attention.cascade)
    merge = awaiting(attention.merge)
    gather = awaiting(attention.gather)
    delete_sequences = awaiting(control.delete_sequences)
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
    export = moving.export_async
    import_ = moving.import_async
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
            for event in page.told:
                yield event
            if not page.events:
                await asyncio.sleep(poll_s)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the service is ready; raises `NeverReady` with its own reason."""
        ends = time.monotonic() + timeout
        while True:
            try:
                health = await self.ready()
            except TransportError as error:
                health = unreachable(error)
            if health.ok:
                return
            if time.monotonic() >= ends:
                raise not_ready(timeout, health)
            await asyncio.sleep(POLL_S)

    def with_options(self, *, deadline: float | None = None, request_id: str | None = None) -> Self:
        """As `Client.with_options`."""
        view = object.__new__(type(self))
        view._transport = self._transport
        view._repeats = self._repeats
        view._manner = replace(self._manner, deadline_s=deadline, request_id=checked(request_id))
        return view

    async def send(self, call: Call[T]) -> T:
        """Carry out one call: `carry_out`, awaited."""
        tried = first(call, self._manner)
        try:
            return call.parse(await self._attempt(tried))
        except AttndError as error:
            return await self._go_on(tried, error)

    async def _go_on(self, tried: Send[T], error: AttndError) -> T:
        """`methods.go_on`, awaited."""
        steps = repeated(tried, error, self._manner)
        outcome: Outcome = None
        try:
            while True:
                step = steps.send(outcome)
                if isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                    outcome = None
                    continue
                try:
                    outcome = await self._attempt(step)
                except AttndError as failed:
                    outcome = failed
        except StopIteration as stop:
            return cast(T, stop.value)
        finally:
            del outcome, error  # an error's traceback leads to this frame

    async def _attempt(self, step: Send[Any]) -> Reply:
        request = request_of(step.call, step.request_id, step.timeout_s, step.deadline_s)
        return reply_of(await self._transport.send(request), step.request_id, step.call)

    async def aclose(self) -> None:
        """Close the connections, of every `with_options` view too."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
