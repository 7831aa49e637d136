"""Answers as HTTP carries them: a JSON object, and the binary tensor data behind it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from attnd.wire.dtypes import Part

from service.doors.oip.answer import REMEMBERED_BYTES, Answer, Output, read_answer
from service.doors.oip.json_request import BINARY_SIZE
from service.doors.oip.models import VERSION
from service.doors.oip.request import Wanted
from service.image.json_tensors import write_data
from service.image.json_text import dump_json


def answer_parts(name: str, image: memoryview, wanted: Wanted) -> tuple[list[Part], int]:
    """The body for an answer of model `name`, as buffers to send in order; and how many bytes of
    it are JSON, 0 when all are. Binary data is sent as it lies in the image."""
    answer = read_answer(image, wanted)
    data: list[Part] = [answer.data(image, one) for one in answer.outputs if one.is_binary]
    if wanted.has_text:
        text = body_head(name, answer, wanted, image)
    elif answer.start <= REMEMBERED_BYTES:
        text = binary_head(name, answer, wanted)
    else:
        text = binary_head.__wrapped__(name, answer, wanted)
    return [text, *data], len(text) if data else 0


@lru_cache(maxsize=256)
def binary_head(name: str, answer: Answer, wanted: Wanted) -> bytes:
    """The JSON of an answer whose outputs are all binary: that of one which was read before is
    remembered."""
    return body_head(name, answer, wanted, memoryview(b""))


def body_head(name: str, answer: Answer, wanted: Wanted, image: memoryview) -> bytes:
    """The JSON of an answer."""
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
    told = {"name": entry.name, "datatype": output.datatype, "shape": entry.shape}
    if output.is_binary:
        yield dump_json({**told, "parameters": {BINARY_SIZE: output.size}}).encode()
        return
    yield dump_json(told)[:-1].encode() + b',"data":['
    yield from write_data(np.frombuffer(answer.data(image, output), entry.dtype))
    yield b"]}"
