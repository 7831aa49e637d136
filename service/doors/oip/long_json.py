"""What the process for long JSON does with requests and answers of the protocol."""

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
    """The image of a request whose JSON lies from `begin` to `end`, and what the answer is to
    be."""
    begin, end = given["begin"], given["end"]
    call = read_request(model_of(given["model"]), bytes(body[begin:end]), body[end:])
    return call.pieces, asdict(call.wanted)


def answer_of_image(
    image: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The answer that was wanted, and how much of it is JSON."""
    parts, json_bytes = answer_parts(given["model"], image, wanted_of(given["wanted"]))
    return parts, {"json_bytes": json_bytes}


def wanted_of(told: Mapping[str, Any]) -> Wanted:
    """`Wanted` again, after `asdict`."""
    return Wanted(**{**told, "outputs": tuple((name, flag) for name, flag in told["outputs"])})
