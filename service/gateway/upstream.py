"""The service behind the gateway: an engine of this host by a session, or any service by HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from attnd import errors
from attnd.calls.call import Call, Reply
from attnd.http.async_transport import LoopTransport
from attnd.http.messages import reply_of, request_of
from attnd.http.origin import KEY, Origin
from attnd.retries import Attempt
from attnd.wire.frames import STAGES

from config.server import ServerSettings
from service.doors.kit.headers import call_id_of
from service.doors.kit.ledger import GatewayRequest
from service.doors.kit.link import Link
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import EngineReply, call_engine
from service.errors import DeadlineExceeded, InvalidRequest, NotReady, Unauthorized
from service.gateway.requests import Inference
from service.image.json_text import dump_json
from service.keys import Authenticator
from service.tenants import ANONYMOUS, OPEN, Tenant

GRACE_S: Final = 5.0
"""The service keeps deadlines itself. A call fails when it is silent this long after one."""
TIMED: Final = [stage.replace("_", "-") for stage in STAGES]
KNOWN_S: Final = 5.0
"""How long a service's key is known before it is asked again."""
MAX_KNOWN: Final = 4096
MAX_CHECKS: Final = 8
"""Unknown keys about which a service is asked at once."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is. `share` is the same for all calls of one namespace, empty without keys."""

    share: str = ""
    tenant: Tenant = ANONYMOUS
    authorization: str = ""


def as_service_error(error: errors.AttndError) -> Exception:
    match error:
        case errors.ServiceError() if error.code:
            return ProblemText(dump_json(error.problem))
        case errors.TimedOut():
            return DeadlineExceeded("no reply in time; the operation may have been applied")
        case _:
            return NotReady(f"the service cannot be called: {error}")


class OnHost:
    """The engine of the gateway's own service, as a door on a session."""

    def __init__(self, limits: ServerSettings, authenticator: Authenticator | None) -> None:
        self.authenticator = authenticator
        self.link = Link(limits, authenticator is not None)

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Raises OSError, NotReady, FrameError."""
        await self.link.connect(path, name, secret)

    async def caller(self, authorization: str) -> Caller:
        if self.authenticator is None:
            return Caller(tenant=OPEN)
        tenant = self.authenticator.tenant_of(authorization.encode("latin-1", "replace"))
        return Caller(tenant.namespace, tenant)

    async def check_ready(self) -> None:
        self.link.check_heard()

    async def call(
        self, caller: Caller, request: Inference, record: GatewayRequest, deadline_s: float | None
    ) -> EngineReply:
        self.link.ready()
        return await call_engine(
            self.link,
            request.model.operation,
            request.fields,
            caller.tenant,
            request.arrays,
            0 if deadline_s is None else max(1, int(deadline_s * 1e6)),
            call_id_of(record.request_id),
        )

    async def close(self) -> None:
        self.link.close()


class Elsewhere:
    """A service by its URL: each call goes there with its caller's key."""

    def __init__(self, origin: Origin, deadline_s: float) -> None:
        self.transport, self.deadline_s = LoopTransport(origin), deadline_s
        self.known: dict[str, float] = {}
        """Until when a key needs no check, by the monotonic clock."""
        self.checks = asyncio.Semaphore(MAX_CHECKS)

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Nothing: connections are made when they are needed."""

    async def send(
        self,
        authorization: str,
        call: Call[Any],
        record: GatewayRequest,
        deadline_s: float | None = None,
    ) -> Reply:
        seconds = (deadline_s or self.deadline_s) + GRACE_S
        request_id = record.request_id.decode("ascii")
        try:
            made = request_of(Attempt(call, request_id, seconds, deadline_s))
            more = {"authorization": authorization, "traceparent": record.traceparent.decode()}
            made.headers |= {name: value for name, value in more.items() if value}
            return reply_of(await self.transport.send(made), request_id, call)
        except errors.AttndError as error:
            raise as_service_error(error) from error
        except (TypeError, UnicodeEncodeError):  # a field of the path, which is text there
            rule = "must be a string of Unicode"
            raise InvalidRequest("id", call.fields.get("id"), rule) from None

    async def caller(self, authorization: str) -> Caller:
        """Asks the service about a key that it was not asked about lately."""
        if not all(map(KEY.fullmatch, authorization.split())):
            raise Unauthorized("a key has visible ASCII characters: send Authorization: Bearer KEY")
        now = time.monotonic()
        if self.known.get(authorization, 0.0) < now:
            async with self.checks:
                try:
                    await self.check(authorization, "info")
                except ProblemText as refused:
                    if refused.problem["status"] != 403:  # a key without the scope is one, too
                        raise
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[authorization] = now + KNOWN_S
        return Caller(authorization, OPEN, authorization)

    async def check(self, authorization: str, operation: str) -> None:
        """Raises the service's error unless this key may call the operation."""
        call = Call(operation, parse=lambda reply: reply)
        await self.send(authorization, call, GatewayRequest.begin("-", "-", "-", {}.get), GRACE_S)

    async def check_ready(self) -> None:
        await self.check("", "ready")

    async def call(
        self, caller: Caller, request: Inference, record: GatewayRequest, deadline_s: float | None
    ) -> EngineReply:
        name, fields, arrays = request.model.name, request.fields, request.arrays
        call = Call(name, parse=lambda reply: reply, fields=fields, arrays=arrays)
        reply = await self.send(caller.authorization, call, record, deadline_s)
        stages = tuple(reply.meta.timings.get(stage, 0.0) for stage in TIMED)
        return EngineReply(reply.fields, dict(reply.tensors), stages)

    async def close(self) -> None:
        await self.transport.aclose()


Upstream = OnHost | Elsewhere
"""Their methods raise the errors of `service.errors`, and ProblemText; `check_ready` NotReady too,
or DeadlineExceeded."""
