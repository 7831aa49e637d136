"""Admission to the gRPC door: authentication, and limits on calls at once.

A call is admitted by its metadata, before any of its messages is received.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from config.server import ServerSettings
from service.doors.grpc.rpc import Rpc, problem_metadata, status_of
from service.doors.kit.authentication import Authenticator
from service.doors.kit.ledger import Ledger
from service.doors.kit.problems import document_of
from service.errors import AttndError, MalformedRequest, Overloaded
from service.tenants import OPEN, Tenant

AUTHORIZATION: Final = "authorization"
LATER_S: Final = 0.5
"""A stream times out by itself; another call without a message is cancelled this much later."""
SHARES: Final = 2
"""With keys, one namespace may have 1/2 of all calls."""


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The calls of one door. A call counts until its task ends."""

    def __init__(
        self,
        limits: ServerSettings,
        authenticator: Authenticator | None,
        ledger: Ledger,
        needs_no_key: frozenset[str],
    ) -> None:
        self.limits = limits
        self.authenticator = authenticator
        self.ledger = ledger
        self.needs_no_key = needs_no_key
        """Methods that respond without a key, and without a message."""
        self.taken: Counter[str] = Counter()
        """Calls by namespace."""
        self.silent: dict[Any, asyncio.TimerHandle] = {}
        """Timers of calls without a message, by their tasks."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        method = details.method.rpartition("/")[2]
        handler = await continuation(details)
        if handler is None or method in self.needs_no_key:
            return handler
        try:
            tenant = tenant_of(self.authenticator, details.invocation_metadata)
            self.take_place(tenant)
        except AttndError as error:
            return self.refusing(method, error)
        return handler

    def take_place(self, tenant: Tenant) -> None:
        """Raises Overloaded."""
        most = self.limits.grpc_max_calls
        share = most if self.authenticator is None else max(most // SHARES, 1)
        name = tenant.namespace
        if self.taken.total() >= most or self.taken[name] >= share:
            text = (
                f"{self.taken[name]} calls of this namespace are running, limits are {share} and "
                f"{most} for all: retry later, or raise server.grpc_max_calls"
            )
            raise Overloaded(text, retry_after_s=1.0)
        task: Any = asyncio.current_task()
        self.taken[name] += 1
        loop = asyncio.get_running_loop()
        self.silent[task] = loop.call_later(self.limits.receive_timeout_s + LATER_S, task.cancel)
        task.add_done_callback(lambda task: self.give_place(task, name))

    def give_place(self, task: Any, name: str) -> None:
        self.message_came(task)
        self.taken[name] -= 1
        if not self.taken[name]:
            del self.taken[name]

    def message_came(self, task: Any = None) -> None:
        """A call has its first message: stop its timer."""
        timer = self.silent.pop(task or asyncio.current_task(), None)
        if timer is not None:
            timer.cancel()

    def refusing(self, method: str, error: AttndError) -> Any:
        """A handler that responds with an error, and reads nothing."""

        async def refuse(_: Any, context: Any) -> None:
            rpc = Rpc(context, method)
            problem = document_of(error, rpc.request_id)
            rpc.end(problem["status"], problem["code"])
            self.ledger.add(rpc)
            code, text = status_of(problem)
            if isinstance(error, Overloaded):  # as gRPC's own limits
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, text, (*rpc.trailing, *problem_metadata(problem)))

        return grpc.stream_stream_rpc_method_handler(refuse)


def tenant_of(authenticator: Authenticator | None, metadata: Any) -> Tenant:
    """The tenant of a call. Raises Unauthorized, MalformedRequest."""
    if authenticator is None:
        return OPEN
    shown = [value for name, value in metadata or () if name == AUTHORIZATION]
    if len(shown) > 1:
        raise MalformedRequest("the metadata authorization is given twice: send it once")
    text = shown[0] if shown else ""
    return authenticator.tenant_of(
        text.encode("latin-1", "replace") if isinstance(text, str) else text
    )
