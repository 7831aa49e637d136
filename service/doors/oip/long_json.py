"""Requests and responses of the protocol with long JSON, in the worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnd.wire.dtypes import Part

from service.doors.oip.json_answer import answer_parts
from service.doors.oip.json_request import read_request
from service.doors.oip.models import model_of
from service.doors.oip.request import Wanted


def image_of_request(
    body: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The image of a request whose JSON is `body[begin:end]`, and the form of its response."""
    begin, end = given["begin"], given["end"]
    call = read_request(model_of(given["model"]), bytes(body[begin:end]), body[end:])
    return call.pieces(body[end:]), asdict(call.wanted)


def answer_of_image(
    image: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The response, and the length of its JSON."""
    parts, json_bytes = answer_parts(given["model"], image, wanted_of(given["wanted"]))
    return parts, {"json_bytes": json_bytes}


def wanted_of(fields: Mapping[str, Any]) -> Wanted:
    """The inverse of `asdict`."""
    return Wanted(**{**fields, "outputs": tuple((name, flag) for name, flag in fields["outputs"])})
