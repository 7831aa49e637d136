"""`Call`: one request as a value, with how to read its answer and when it may be sent again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from numpy.typing import NDArray

from attnd import tensors
from attnd.errors import ProtocolError, ServiceError, service_error
from attnd.results import Meta

T = TypeVar("T")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A decoded answer: JSON fields, tensors where the route has them, text for /metrics."""

    status: int
    fields: dict[str, Any]
    tensors: dict[str, Array]
    text: str
    meta: Meta


@dataclass(frozen=True, slots=True)
class Settled(Generic[T]):
    """The answer that a lost reply must have carried."""

    value: T


@dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[T]):
    """`parse` reads a successful answer (or one whose status is in `also_answers`).

    `repeatable`: after a lost reply it may be sent again, because doing it twice does no harm.
    `recover`: what a refusal means when an earlier attempt's reply was lost and the earlier attempt
    was, as it turns out, carried out: the answer itself, or a call that gets it. None: an error.
    """

    method: str
    path: str
    parse: Callable[[Reply], T]
    repeatable: bool
    params: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    also_answers: tuple[int, ...] = ()
    recover: Callable[[ServiceError], Settled[T] | Call[T] | None] = lambda error: None


def read_reply(response: httpx.Response, request_id: str, also_answers: tuple[int, ...]) -> Reply:
    """Decode a response; raises the `ServiceError` it carries, or `ProtocolError`."""
    meta = read_meta(response, request_id)
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    fields: Any = {}
    arrays: dict[str, Array] = {}
    try:
        if media_type == tensors.MEDIA_TYPE:
            fields, arrays = tensors.decode(response.content)
        elif media_type.endswith("json") and response.content:
            fields = response.json()
    except ValueError as error:
        told = f"the answer cannot be read as {media_type}: {error}"
        raise ProtocolError(told, meta.request_id) from error
    if not response.is_success and response.status_code not in also_answers:
        if isinstance(fields, dict) and "code" in fields:
            raise service_error(fields, meta)
        # Not attnd's own document: a proxy in between, or not attnd at all.
        told = f"HTTP {response.status_code} from {response.url}"
        problem = {"status": response.status_code, "title": told, "detail": told}
        raise ServiceError(problem, meta)
    if not isinstance(fields, dict):
        raise ProtocolError(
            f"the answer is not a JSON object: {response.text[:200]}", meta.request_id
        )
    text = response.text if media_type.startswith("text/") else ""
    return Reply(response.status_code, fields, arrays, text, meta)


def read_meta(response: httpx.Response, request_id: str) -> Meta:
    return Meta(
        request_id=response.headers.get("x-request-id", request_id),
        timings=server_timing(response.headers.get("server-timing", "")),
        retry_after_s=seconds(response.headers.get("retry-after")),
    )


def server_timing(header: str) -> dict[str, float]:
    """`queue;dur=0.05, kernel;dur=1.2` (milliseconds) as seconds by stage."""
    timings: dict[str, float] = {}
    for entry in header.split(","):
        name, _, rest = entry.strip().partition(";")
        for parameter in rest.split(";"):
            key, _, value = parameter.strip().partition("=")
            if key == "dur" and (duration := seconds(value)) is not None:
                timings[name] = duration / 1e3
    return timings


def seconds(text: str | None) -> float | None:
    """A number as text; None where there is none (the date form of Retry-After included)."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
