"""The error codes of the service, shared with its clients: status and title by code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """How one kind of error looks outside the service, in a problem document (RFC 9457)."""

    status: int
    code: str
    title: str


CODES: Final = {
    code: ErrorCode(status, code, title)
    for status, code, title in (
        (400, "malformed_body", "The body cannot be read"),
        (400, "malformed_request", "The request cannot be read"),
        (401, "unauthorized", "A key is needed"),
        (403, "forbidden", "This is not allowed"),
        (404, "not_found", "No such route"),
        (404, "unknown_sequence", "No such sequence"),
        (404, "unknown_lease", "No such lease"),
        (404, "unknown_page", "No such page"),
        (404, "unknown_import", "No such import"),
        (405, "method_not_allowed", "The route has other methods"),
        (408, "request_timeout", "The request took too long to arrive"),
        (409, "sequence_exists", "The sequence exists already"),
        (409, "length_mismatch", "Offsets differ from the stored lengths"),
        (409, "key_mismatch", "A page has another name already"),
        (409, "sequence_changed", "The sequence changed during its export"),
        (409, "import_exists", "The id is being imported from another export"),
        (409, "part_mismatch", "Another part is expected next"),
        (410, "lost_sequence", "The sequence was lost with its engine"),
        (413, "body_too_large", "The body is too large"),
        (413, "answer_too_large", "The answer is too large"),
        (415, "unsupported_media_type", "The media type is not supported"),
        (422, "invalid_request", "The request breaks a rule"),
        (422, "digest_mismatch", "The data is not the exported data"),
        (429, "overloaded", "The queue is full"),
        (431, "headers_too_large", "The request's headers are too large"),
        (499, "cancelled", "The caller cancelled the operation"),
        (500, "internal", "A bug in the service"),
        (500, "not_erased", "Not all of the namespace could be erased"),
        (501, "not_supported", "The service does not do this"),
        (503, "not_ready", "The service is not ready"),
        (504, "deadline_exceeded", "The deadline passed before the request was done"),
        (507, "out_of_pages", "The pool is out of pages"),
        (507, "out_of_sequences", "The pool is out of sequences"),
    )
}


def code_of(name: str) -> str:
    """The code of an exception class: `UnknownPage` is `unknown_page`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
