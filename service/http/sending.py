"""Sending responses, and handing operations to the engine while watching the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from service import errors
from service.engine.engine import Engine
from service.engine.operations import Operation, Reply
from service.http.bodies import PROBLEM
from service.http.exchange import ClientGone, Exchange, Headers, Receive, Send
from service.wire import Part, dump_json

LOG: Final = logging.getLogger("attnd.http")
JOIN_BYTES: Final = 64 * 2**10
"""Below this, copying the parts into one buffer is cheaper than sending them one by one."""
WATCH_AFTER_S: Final = 0.02
"""Most answers are there sooner: only then is it worth a task to see whether the client is."""


async def respond(
    send: Send,
    exchange: Exchange,
    status: int,
    content_type: bytes,
    parts: Sequence[Part],
    extra: Headers | None = None,
) -> None:
    """One response of known length; large parts are sent as they lie in memory."""
    length = sum(map(len, parts))
    headers: Headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % length),
        *exchange.headers(),
        *(extra or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if length <= JOIN_BYTES:
        parts = [b"".join(parts)]
    last = len(parts) - 1
    for index, part in enumerate(parts):
        await send({"type": "http.response.body", "body": part, "more_body": index < last})


def problem_parts(error: BaseException, exchange: Exchange) -> tuple[int, str, bytes, Headers]:
    """Status, code, body and extra headers that tell an error."""
    kind = errors.kind_of(error)
    document = errors.problem(error)
    extra: Headers = []
    match error:
        case errors.MethodNotAllowed():
            extra.append((b"allow", ", ".join(error.extra["allow"]).encode()))
        case errors.Overloaded():
            extra.append((b"retry-after", retry_after(error.extra.get("retry_after_s", 1.0))))
        case errors.NotReady():
            extra.append((b"retry-after", b"1"))
    if kind.status == 500:
        fields = {"id": exchange.request_id.decode("ascii")}
        LOG.error("internal error", exc_info=error, extra={"fields": fields})
    return kind.status, kind.code, dump(document), extra


def retry_after(seconds: float) -> bytes:
    """Whole seconds, rounded up, as RFC 9110 has them; the document carries the fraction."""
    return b"%d" % max(1, -int(-seconds // 1))


async def respond_problem(send: Send, exchange: Exchange, error: BaseException) -> tuple[int, str]:
    """Send an error; answers its status and code."""
    status, code, body, extra = problem_parts(error, exchange)
    await respond(send, exchange, status, PROBLEM.encode(), [body], extra)
    return status, code


def dump(document: Any) -> bytes:
    return dump_json(document).encode()


async def submit(
    engine: Engine,
    operation: Operation,
    exchange: Exchange,
    receive: Receive,
    default_deadline_s: float,
) -> Reply:
    """The engine's reply. A client that hangs up meanwhile takes its operation out of the queue.

    Raises what `Engine.submit` raises, and `ClientGone`.
    """
    asked = exchange.deadline_s
    deadline_s = default_deadline_s if asked is None else asked
    watch = Watch(receive)
    starting = asyncio.get_running_loop().call_later(WATCH_AFTER_S, watch.start)
    try:
        reply = await engine.submit(operation, deadline_s=deadline_s)
    except asyncio.CancelledError:
        if watch.gone:
            watch.waiting.uncancel()
            raise ClientGone from None
        raise
    finally:
        starting.cancel()
        watch.stop()
    exchange.timings = reply.timings
    return reply


class Watch:
    """Cancels the task that made it when the client hangs up."""

    __slots__ = ("gone", "receive", "task", "waiting")

    def __init__(self, receive: Receive) -> None:
        waiting = asyncio.current_task()
        if waiting is None:
            raise RuntimeError("no task to cancel: this is a bug")
        self.waiting: asyncio.Task[Any] = waiting
        self.receive = receive
        self.gone = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.waiting.cancel()

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
