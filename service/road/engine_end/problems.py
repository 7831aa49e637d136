"""Errors as images: a status, and a header that holds the problem document."""

from __future__ import annotations

from service.errors import problem
from service.image.json_text import dump_json
from service.image.writing import PROBLEM, header


def problem_image(error: BaseException) -> tuple[int, bytes]:
    """The status of an error, and the image that tells it: `__metadata__.problem`, no tensors."""
    document = problem(error)
    return int(document["status"]), header(PROBLEM, dump_json(document), ())
