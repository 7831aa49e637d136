"""Calls as HTTP requests, and HTTP responses as replies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from attnd.calls.call import Call, Reply
from attnd.errors import ProtocolError, ServiceError, service_error
from attnd.retries import Attempt
from attnd.wire import images, operations
from attnd.wire.dtypes import Array, Part
from attnd.wire.frames import dump_json
from attnd.wire.images import Bytes, request_image
from attnd.wire.meta import NO_META, Meta, Timings

T = TypeVar("T")

ROUTES: Final[Mapping[str, tuple[str, str]]] = {
    **{name: (method, path) for name, (_, method, path) in operations.ROUTES.items()},
    "live": ("GET", "/health/live"),
    "ready": ("GET", "/health/ready"),
    "metrics": ("GET", "/metrics"),
}
"""Method and path by call."""

TENSORS: Final = frozenset(
    {
        *("append", "gather", "decode", "prefill", "ragged_prefill", "cascade", "merge"),
        *("export_sequence", "import_sequence", "put_records", "get_records"),
    }
)
"""Operations whose requests and answers are images. All others are JSON, apart from requests with
arrays and the answer of `snapshot`."""

MIN_DEADLINE_MS: Final = 1.0
"""Minimum deadline of the service; a shorter one passes at this end first."""
MAX_DEADLINE_MS: Final = 3_600_000.0
"""Maximum deadline of the service; a longer one is enforced at this end only."""

Body = tuple[Part, ...]


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Request:
    """One attempt. `headers` are all but the request id, `body` the parts to send in order;
    `timeout_s` includes connecting."""

    method: str
    target: str
    request_id: str
    headers: dict[str, str]
    body: Body
    timeout_s: float

    @property
    def body_bytes(self) -> int:
        return sum(map(len, self.body))


EMPTY: Final = {"status": 422, "code": "invalid_request", "value": "", "rule": "must not be empty"}
"""A problem document of the service's kind, for an id in a path."""


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a call
class Response:
    """A complete answer; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    content: Bytes


def request_of(attempt: Attempt[Any]) -> Request:
    """The HTTP request of an attempt, with its deadline where it has one."""
    call = attempt.call
    method, target = ROUTES[call.operation]
    headers: dict[str, str] = {}
    fields = call.fields
    if "{" in target:
        own = target[target.index("{") + 1 : target.index("}")]
        if fields[own] == "":  # another path, which the service does not have
            raise service_error(EMPTY | {"field": own, "detail": f"{own} is empty"}, NO_META)
        target = target.replace(f"{{{own}}}", quote(fields[own], safe=""))
        fields = {name: value for name, value in fields.items() if name != own}
    body: Body = ()
    if call.arrays or call.operation in TENSORS:
        headers["content-type"] = headers["accept"] = images.MEDIA_TYPE
        body = tuple(request_image(fields, call.arrays))
    elif method in ("POST", "PUT"):
        headers["content-type"] = "application/json"
        body = (dump_json(fields).encode(),)
    elif fields:
        plain = {  # `true` and `false` as in JSON
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in fields.items()
        }
        target = f"{target}?{urlencode(plain)}"
    elif call.operation == "snapshot":
        headers["accept"] = images.MEDIA_TYPE
    if attempt.deadline_s is not None:
        deadline_ms = min(max(attempt.deadline_s * 1e3, MIN_DEADLINE_MS), MAX_DEADLINE_MS)
        headers["x-attnd-deadline-ms"] = f"{deadline_ms:.3f}"
    return Request(method, target, attempt.request_id, headers, body, attempt.timeout_s)


def reply_of(response: Response, request_id: str, call: Call[T]) -> Reply:
    """Decode a response; raises the `ServiceError` it carries, or `ProtocolError`."""
    headers = response.headers
    timings = Timings(server_timing, headers.get("server-timing", ""))
    retry_after_s = seconds(headers["retry-after"]) if "retry-after" in headers else None
    meta = Meta(headers.get("x-request-id", request_id), timings, retry_after_s)
    media_type = plain_media_type(headers.get("content-type", ""))
    fields: Any = {}
    arrays: dict[str, Array] = {}
    try:
        if media_type == images.MEDIA_TYPE:
            fields, arrays = images.decode(response.content)
        elif media_type.endswith("json") and len(response.content):
            fields = json.loads(response.content.tobytes())
    except ValueError as error:
        detail = f"the answer cannot be read as {media_type}: {error}"
        raise ProtocolError(detail, meta.request_id) from error
    if not 200 <= response.status < 300 and response.status not in call.also_answers:
        raise refusal(response.status, fields, meta, call)
    if not isinstance(fields, dict):
        detail = f"the answer is not a JSON object: {text_of(response)[:200]}"
        raise ProtocolError(detail, meta.request_id)
    text = text_of(response) if media_type.startswith("text/") else ""
    return Reply(response.status, fields, arrays, text, meta)


def refusal(status: int, document: Any, meta: Meta, call: Call[T]) -> ServiceError:
    if isinstance(document, dict) and "code" in document:
        return service_error(document, meta)
    # Not a document of attnd: a proxy in between, or another program.
    title = f"HTTP {status} from {' '.join(ROUTES[call.operation])}"
    return ServiceError({"status": status, "title": title, "detail": title}, meta)


def text_of(response: Response) -> str:
    return response.content.tobytes().decode("utf-8", "replace")


@lru_cache(maxsize=64)
def plain_media_type(header: str) -> str:
    """A content type without its parameters."""
    return header.partition(";")[0].strip().lower()


DURATION: Final = re.compile(r";\s*dur\s*=\s*([^;\s]+)")


def server_timing(header: str) -> dict[str, float]:
    """`queue;dur=0.05, kernel;dur=1.2` (milliseconds) as seconds by stage."""
    timings: dict[str, float] = {}
    for entry in header.split(","):
        found = DURATION.search(entry)
        duration = seconds(found[1]) if found else None
        if duration is not None:
            timings[entry.partition(";")[0].strip()] = duration / 1e3
    return timings


def seconds(text: str) -> float | None:
    """A number in a header; None for other text, such as the date form of Retry-After."""
    try:
        return float(text)
    except ValueError:
        return None
