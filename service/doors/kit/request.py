"""What is known of a request that was answered, whatever its protocol: for log, metrics, spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from service.tenants import Tenant

CLIENT_GONE: Final = 499
"""The status logged for a client that hung up; nobody is there to read it."""


class Request(Protocol):
    """`status` is as in HTTP, `started` by the performance counter; `traceparent` is empty where
    the caller has none."""

    @property
    def request_id(self) -> bytes: ...
    @property
    def op(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def started(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stages(self) -> Sequence[float]: ...
    @property
    def peer(self) -> str: ...
    @property
    def tenant(self) -> Tenant: ...
    @property
    def traceparent(self) -> bytes: ...
