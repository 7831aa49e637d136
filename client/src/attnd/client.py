"""`Client` and `AsyncClient`: the methods of `attnd.methods` over HTTP, with a connection pool."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

from attnd.calls.call import Call, Reply
from attnd.dependents import Dependents
from attnd.http.async_transport import AsyncTransport, LoopTransport
from attnd.http.blocking_transport import SocketTransport, Transport
from attnd.http.messages import reply_of, request_of
from attnd.http.origin import Certificate, Origin, Verify, origin_of
from attnd.methods import AsyncCalls, Calls
from attnd.retries import Attempt, Retries, execute, execute_async, options_of

T = TypeVar("T")
C = TypeVar("C")


class HttpClient(Generic[C]):
    """The connections of the clients over HTTP; `Client` documents the arguments."""

    _connections: Callable[[Origin], C]

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
        transport: C | None = None,
    ) -> None:
        self._options = options_of(timeout, retries)
        self._transport: C = transport or self._connections(
            origin_of(base_url, uds, api_key, verify, cert)
        )
        self.dependents = Dependents()
        """Objects to close before the client."""


class Client(HttpClient[Transport], Calls):
    """A blocking client; threads may share it. Close it, or use it as a context manager.

    `base_url` like `http://127.0.0.1:8080`, or `uds` the path of the service's Unix socket.
    `api_key` is the caller's key, where the service has keys. Over https, `verify` is a PEM file of
    authorities in place of the system's (or an `ssl.SSLContext`; False trusts any server), and
    `cert` a PEM file, or (certificate, key), for a service that requires client certificates.
    `timeout` bounds one attempt in seconds; `retries` is the number of retries, or `Retries`, where
    a retry is safe (see `attnd.retries`). `transport` replaces the connections, for tests.
    """

    _connections = SocketTransport

    def send(self, call: Call[T]) -> T:
        """Execute one call, retries included; raises `AttndError`."""
        return execute(call, self._options, self._send_attempt)

    def _send_attempt(self, attempt: Attempt[Any]) -> Reply:
        response = self._transport.send(request_of(attempt))
        return reply_of(response, attempt.request_id, attempt.call)

    def close(self) -> None:
        """Close the connections, of every `with_options` view too.

        Caches of transformers that use it delete their sequences first.
        """
        self.dependents.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(HttpClient[AsyncTransport], AsyncCalls):
    """The asyncio client: the methods, arguments and results of `Client`, awaited."""

    _connections = LoopTransport

    def send(self, call: Call[T]) -> Coroutine[Any, Any, T]:
        """As `Client.send`, awaited."""
        return execute_async(call, self._options, self._send_attempt)

    async def _send_attempt(self, attempt: Attempt[Any]) -> Reply:
        response = await self._transport.send(request_of(attempt))
        return reply_of(response, attempt.request_id, attempt.call)

    async def aclose(self) -> None:
        """Close the connections, of every `with_options` view too."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
