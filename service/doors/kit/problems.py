"""Errors as problem documents, from this door or the engine."""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from service import errors
from service.image.json_text import load_json

LOG: Final = logging.getLogger("attnd.doors")


class ProblemText(Exception):
    """An error of another process; `text` is its problem document."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @property
    def problem(self) -> dict[str, Any]:
        read: dict[str, Any] = load_json(self.text.encode(), "the problem")
        return read


def problem_headers(document: dict[str, Any]) -> dict[str, str]:
    """The headers of an error's response beside its type."""
    match document["status"]:
        case 401:
            return {"www-authenticate": "Bearer"}
        case 405:
            return {"allow": ", ".join(document["allow"])}
        case 429:  # RFC 9110 has whole seconds; the document has the fraction
            return {"retry-after": str(max(1, math.ceil(document.get("retry_after_s", 1.0))))}
        case 503:
            return {"retry-after": "1"}
        case _:
            return {}


GRPC_CODES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "FAILED_PRECONDITION",
    410: "NOT_FOUND",
    413: "OUT_OF_RANGE",
    422: "INVALID_ARGUMENT",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    507: "RESOURCE_EXHAUSTED",
}


def grpc_code(document: dict[str, Any]) -> str:
    """The name of gRPC's status code for an error."""
    if document["code"] == "sequence_exists":
        return "ALREADY_EXISTS"
    if document["code"] == "overloaded" and "limit" in document:  # as gRPC's own limits
        return "RESOURCE_EXHAUSTED"
    return GRPC_CODES.get(document["status"], "INTERNAL")


def document_of(error: BaseException, request_id: bytes) -> dict[str, Any]:
    """The problem document of an error. Any error but an AttndError is a bug, and logged with its
    traceback."""
    if isinstance(error, ProblemText):
        return error.problem
    if errors.kind_of(error).status == 500:
        fields = {"id": request_id.decode("ascii")}
        LOG.error("internal error", exc_info=error, extra={"fields": fields})
    return errors.problem(error)
