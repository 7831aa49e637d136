"""Authentication of sessions with the engine, and the tenants of their calls."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from attnd.wire.frames import TENANT, FrameError

from service.errors import Unauthorized
from service.keys import Key, Keys
from service.road.messages import Announced, Hello, read
from service.road.tcp import engine_proof, proof
from service.tenants import ANONYMOUS, OPEN, Tenant, tenant_of

REMEDY: Final = "give it as api_key of the session, or as key in HELLO"


@dataclass(slots=True)
class Admission:
    """`keys` None: every caller that can connect is accepted. `secret` authenticates the service's
    own doors; where it is empty there are none. Not frozen: keys are read again during sessions."""

    keys: Keys | None = None
    secret: str = ""


class Standing:
    """The identity of one session. `tenants` are those it may call for, by their number in calls;
    only a door has others than 0."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.tenants: dict[int, Tenant] = {}
        self.key: Key | None = None
        self.is_door = False

    def greet(self, hello: Hello, nonce: str = "") -> None:
        """Authenticate the sender of HELLO; over TCP it answers a CHALLENGE with this nonce.

        Raises Unauthorized."""
        keys, secret = self.admission.keys, self.admission.secret
        if nonce and not hello.door:
            raise Unauthorized("over TCP only doors of the cluster may call: use HTTP")
        if hello.door:
            expected = proof(secret, nonce) if nonce else secret
            if not secret or not hmac.compare_digest(expected, hello.secret):
                raise Unauthorized(
                    "door is true, and only processes that the service has started are its doors: "
                    "send false"
                )
            self.is_door = True
            self.tenants[0] = OPEN if keys is None else ANONYMOUS
        elif keys is None:
            self.tenants[0] = OPEN
        else:
            self.key = keys.check(hello.key.encode(), REMEDY)
            self.tenants[0] = self.key.tenant

    def proof(self, hello: Hello) -> str:
        """Proves to a door that this engine knows the secret; empty where no proof is requested."""
        return engine_proof(self.admission.secret, hello.nonce) if hello.nonce else ""

    def announce(self, payload: bytes) -> None:
        """Process a TENANT frame. Raises FrameError."""
        if not self.is_door:
            raise FrameError("TENANT from a caller that is no door of the service")
        announced = read(TENANT, payload, Announced)
        try:
            self.tenants[announced.number] = tenant_of(announced.namespace, announced.scopes)
        except ValueError as error:
            raise FrameError(f"TENANT {announced.number}: {error}") from error

    def renew(self) -> None:
        """The keys were read again. Raises Unauthorized where this session's was removed."""
        if self.key is None or self.admission.keys is None:
            return
        tenant = self.admission.keys.holder(self.key.digest)
        if tenant is None:
            raise Unauthorized("the key of this session was removed")
        self.tenants[0] = tenant
