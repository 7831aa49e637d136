"""Errors as responses: application/problem+json documents, and the headers that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException

from service.doors.http.protocol.exchange import CONTENT_TYPES, Exchange
from service.doors.kit.media import PROBLEM
from service.doors.kit.problems import document_of
from service.doors.oip.models import error_text
from service.errors import AttndError, MethodNotAllowed, NoSuchRoute
from service.image.json_text import dump_json

INFERENCE_PATHS: Final = "/v2/"
"""Problem documents below this path have the protocol's field `error`, too."""


def problem_response(error: BaseException, exchange: Exchange) -> tuple[int, str, bytes, bytes]:
    """Status, code, document, and header lines for an error."""
    if isinstance(error, HTTPException):
        error = router_error(error, exchange)
    document = document_of(error, exchange.request_id)
    if exchange.path.startswith(INFERENCE_PATHS):
        document["error"] = error_text(document)
    headers = CONTENT_TYPES[PROBLEM] + headers_of(document)
    return document["status"], document["code"], dump_json(document).encode(), headers


def headers_of(document: dict[str, Any]) -> bytes:
    """Header lines for a client's HTTP library."""
    match document["status"]:
        case 401:
            return b"www-authenticate: Bearer\r\n"
        case 405:
            return b"allow: %b\r\n" % ", ".join(document["allow"]).encode()
        case 429:  # RFC 9110 has whole seconds; the document has the fraction
            return b"retry-after: %d\r\n" % max(1, -int(-document.get("retry_after_s", 1.0) // 1))
        case 503:
            return b"retry-after: 1\r\n"
        case _:
            return b""


def router_error(error: HTTPException, exchange: Exchange) -> AttndError:
    """An error of Starlette's router as the service's own."""
    if error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        return wrong_method(exchange, allow)
    return NoSuchRoute(f"{exchange.path}: see /docs")


def wrong_method(exchange: Exchange, allow: Sequence[str]) -> AttndError:
    text = f"{exchange.method} {exchange.path}: use {' or '.join(allow)}"
    return MethodNotAllowed(text, allow=allow)
