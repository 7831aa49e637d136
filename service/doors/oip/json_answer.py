"""Responses over HTTP: a JSON object, and binary tensor data behind it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from attnd.wire.dtypes import Part

from service.doors.oip.answer import MAX_CACHED_BYTES, Answer, Output, read_answer
from service.doors.oip.json_request import BINARY_SIZE
from service.doors.oip.models import VERSION
from service.doors.oip.request import Wanted
from service.image.json_tensors import write_data
from service.image.json_text import dump_json


def answer_parts(name: str, image: memoryview, wanted: Wanted) -> tuple[list[Part], int]:
    """The body of a response, as parts to send in order; and the length of its JSON; 0 for a body
    of JSON only. Binary data is sent from the image, without a copy."""
    answer = read_answer(image, wanted)
    data: list[Part] = [answer.data(image, one) for one in answer.outputs if one.is_binary]
    if wanted.has_text:
        text = body_head(name, answer, wanted, image)
    elif answer.start <= MAX_CACHED_BYTES:
        text = binary_head(name, answer, wanted)
    else:
        text = binary_head.__wrapped__(name, answer, wanted)
    return [text, *data], len(text) if data else 0


@lru_cache(maxsize=256)
def binary_head(name: str, answer: Answer, wanted: Wanted) -> bytes:
    """As `body_head`, cached, for a response whose outputs are all binary."""
    return body_head(name, answer, wanted, memoryview(b""))


def body_head(name: str, answer: Answer, wanted: Wanted, image: memoryview) -> bytes:
    """The JSON of a response."""
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if wanted.id:
        head["id"] = wanted.id
    if answer.parameters:
        head["parameters"] = answer.parameters
    outputs = [b"".join(spell(answer, output, image)) for output in answer.outputs]
    return b"".join((dump_json(head)[:-1].encode(), b',"outputs":[', b",".join(outputs), b"]}"))


def spell(answer: Answer, output: Output, image: memoryview) -> Iterator[bytes]:
    """One output as JSON."""
    entry = output.entry
    head = {"name": entry.name, "datatype": output.datatype, "shape": entry.shape}
    if output.is_binary:
        yield dump_json({**head, "parameters": {BINARY_SIZE: output.size}}).encode()
        return
    yield dump_json(head)[:-1].encode() + b',"data":['
    yield from write_data(np.frombuffer(answer.data(image, output), entry.dtype))
    yield b"]}"
