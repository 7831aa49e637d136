"""What the clients' methods share: how one is made from a call, and the waiting for readiness."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from attnd.errors import TransportError
from attnd.exchange import Manner, Retries
from attnd.results import Health

M = TypeVar("M", bound=Callable[..., Any])

POLL_S: Final = 0.05
"""Between two questions whether the service is ready yet."""


def with_self(method: M, build: Callable[..., Any]) -> M:
    """`method` with the signature of `build` as a method, for `help()` and editors."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(build)
    parameters = [this, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def manner(timeout: float, retries: int | Retries) -> Manner:
    return Manner(timeout, retries=Retries(retries) if isinstance(retries, int) else retries)


def checked(request_id: str | None) -> str | None:
    """A request id that can be a header; raises ValueError for another."""
    if request_id is not None and not (request_id.isascii() and request_id.isprintable()):
        raise ValueError(f"request_id is {request_id!r}: it must be printable ASCII")
    return request_id


def unreachable(error: TransportError) -> Health:
    return Health(False, str(error))


def not_ready(timeout: float, health: Health) -> TimeoutError:
    return TimeoutError(f"not ready after {timeout} s: {health.reason}")
