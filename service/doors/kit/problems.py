"""Errors as problem documents, from this door, its worker for long JSON, or the engine."""

from __future__ import annotations

import logging
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


def document_of(error: BaseException, request_id: bytes) -> dict[str, Any]:
    """The problem document of an error. Any error but an AttndError is a bug, and logged with its
    traceback."""
    if isinstance(error, ProblemText):
        return error.problem
    if errors.kind_of(error).status == 500:
        fields = {"id": request_id.decode("ascii")}
        LOG.error("internal error", exc_info=error, extra={"fields": fields})
    return errors.problem(error)
