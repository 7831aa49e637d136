"""Answers as HTTP carries them: a JSON object, and the binary tensor data behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from service.doors.oip.answer import Output, read_answer
from service.doors.oip.json_request import BINARY_SIZE
from service.doors.oip.models import VERSION
from service.doors.oip.request import Wanted
from service.image.dtypes import Part
from service.image.json_tensors import write_data
from service.image.json_text import dump_json


def answer_parts(name: str, image: memoryview, wanted: Wanted) -> tuple[list[Part], int]:
    """The body for an answer of model `name`, as buffers to send in order; and how many bytes of
    it are JSON, 0 when all are. Binary data is sent as it lies in the image."""
    answer = read_answer(image, wanted)
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if wanted.id:
        head["id"] = wanted.id
    if answer.parameters:
        head["parameters"] = answer.parameters
    text = b"".join(
        (
            dump_json(head)[:-1].encode(),
            b',"outputs":[',
            b",".join(b"".join(spell(output)) for output in answer.outputs),
            b"]}",
        )
    )
    data: list[Part] = [output.data for output in answer.outputs if output.is_binary]
    has_binary = any(output.is_binary for output in answer.outputs)
    return [text, *data], len(text) if has_binary else 0


def spell(output: Output) -> Iterator[bytes]:
    """One output as JSON."""
    entry = output.entry
    told = {"name": entry.name, "datatype": output.datatype, "shape": entry.shape}
    if output.is_binary:
        yield dump_json({**told, "parameters": {BINARY_SIZE: len(output.data)}}).encode()
        return
    yield dump_json(told)[:-1].encode() + b',"data":['
    yield from write_data(np.frombuffer(output.data, entry.dtype))
    yield b"]}"
