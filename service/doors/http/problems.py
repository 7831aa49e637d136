"""Refusals as application/problem+json documents with the headers that belong to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException

from service import errors
from service.doors.http.exchange import Exchange
from service.doors.http.heads import Headers
from service.doors.oip.problems import error_text
from service.image.json_text import dump_json, load_json

LOG: Final = logging.getLogger("attnd.http")
INFERENCE_PATHS: Final = ("/v2/",)
Told = tuple[int, str, bytes, Headers]
"""Status, code, document, and headers beside the usual ones."""


class ProblemText(Exception):
    """A problem that another process has written; `text` is the document."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def tell(error: BaseException, exchange: Exchange) -> Told:
    """How an error is answered; what is no refusal is a bug, and logged with its traceback."""
    document = document_of(error, exchange)
    if exchange.path.startswith(INFERENCE_PATHS):
        document["error"] = error_text(document)
    text = dump_json(document).encode()
    return document["status"], document["code"], text, headers_of(document)


def document_of(error: BaseException, exchange: Exchange) -> dict[str, Any]:
    """An error as a problem document."""
    if isinstance(error, ProblemText):
        written: dict[str, Any] = load_json(error.text.encode(), "the problem")
        return written
    if isinstance(error, HTTPException):
        error = of_framework(error, exchange)
    if errors.kind_of(error).status == 500:
        fields = {"id": exchange.request_id.decode("ascii")}
        LOG.error("internal error", exc_info=error, extra={"fields": fields})
    return errors.problem(error)


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
