"""Refusals as application/problem+json documents with the headers that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException

from service import errors
from service.doors.http.protocol.exchange import Exchange
from service.doors.http.protocol.heads import Headers
from service.doors.kit.problems import document_of
from service.doors.oip.problems import error_text
from service.image.json_text import dump_json

INFERENCE_PATHS: Final = "/v2/"
"""Errors under these say themselves in one string too."""
Told = tuple[int, str, bytes, Headers]
"""Status, code, document, and headers beside the usual ones."""


def tell(error: BaseException, exchange: Exchange) -> Told:
    """How an error is answered."""
    if isinstance(error, HTTPException):
        error = of_framework(error, exchange)
    document = document_of(error, exchange.request_id)
    if exchange.path.startswith(INFERENCE_PATHS):
        document["error"] = error_text(document)
    return document["status"], document["code"], dump_json(document).encode(), headers_of(document)


def headers_of(document: dict[str, Any]) -> Headers:
    """What the document says to a client's HTTP library."""
    match document["status"]:
        case 401:
            return [(b"www-authenticate", b"Bearer")]
        case 405:
            return [(b"allow", ", ".join(document["allow"]).encode())]
        case 429:
            return [(b"retry-after", whole_seconds(document.get("retry_after_s", 1.0)))]
        case 503:
            return [(b"retry-after", b"1")]
        case _:
            return []


def whole_seconds(seconds: float) -> bytes:
    """Rounded up, as RFC 9110 has them; the document carries the fraction."""
    return b"%d" % max(1, -int(-seconds // 1))


def of_framework(error: HTTPException, exchange: Exchange) -> errors.AttndError:
    """The router's refusals in this service's words."""
    if error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        return wrong_method(exchange, allow)
    return errors.NoSuchRoute(f"{exchange.path}: see /docs")


def wrong_method(exchange: Exchange, allow: Sequence[str]) -> errors.AttndError:
    told = f"{exchange.method} {exchange.path}: use {' or '.join(allow)}"
    return errors.MethodNotAllowed(told, allow=allow)
