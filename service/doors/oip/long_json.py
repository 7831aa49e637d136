"""What the process for long JSON does with requests and answers of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from service.doors.oip.json_answer import answer_parts
from service.doors.oip.json_request import read_request
from service.doors.oip.memory import ClientMemory
from service.doors.oip.models import model_of
from service.doors.oip.region_table import Region
from service.doors.oip.request import Call, Input, InRegion, Wanted
from service.image.dtypes import DTYPE_NAMES, DTYPES, Part


def request_told(model: str, begin: int, end: int, memory: ClientMemory) -> dict[str, Any]:
    """What the process has to know of a request whose JSON lies at `begin`, up to `end`."""
    regions = memory.regions
    told = None if regions is None else {name: asdict(one) for name, one in regions.items()}
    owners = sorted(memory.owners)
    return {"model": model, "begin": begin, "end": end, "regions": told, "owners": owners}


def image_of_request(
    body: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The image of such a request, without the tensors that lie in regions; and the call."""
    begin, end, regions = given["begin"], given["end"], given["regions"]
    known = None if regions is None else {name: Region(**one) for name, one in regions.items()}
    memory = ClientMemory(known, given["owners"])
    call = read_request(model_of(given["model"]), bytes(body[begin:end]), body[end:], memory)
    parts = [one for one in call.pieces if not isinstance(one, InRegion)]
    return parts, call_told(call)


def answer_of_image(
    image: memoryview, given: Mapping[str, Any]
) -> tuple[list[Part], dict[str, Any]]:
    """The answer that was wanted, and how much of it is JSON."""
    parts, json_bytes = answer_parts(given["model"], image, wanted_of(given["wanted"]))
    return parts, {"json_bytes": json_bytes}


def call_told(call: Call) -> dict[str, Any]:
    """A call but for its bytes."""
    tensors = [
        {
            "name": one.name,
            "dtype": DTYPE_NAMES[one.dtype],
            "shape": one.shape,
            "place": None if one.place is None else asdict(one.place),
        }
        for one in call.tensors
    ]
    return {"head": len(call.head), "tensors": tensors, "wanted": asdict(call.wanted)}


def call_of(told: Mapping[str, Any], image: memoryview) -> Call:
    """The call again, with the bytes that lie in its image."""
    at: int = told["head"]
    tensors = []
    for one in told["tensors"]:
        place = None if one["place"] is None else InRegion(**one["place"])
        tensor = Input(one["name"], DTYPES[one["dtype"]], tuple(one["shape"]), b"", place=place)
        if place is None:
            tensor = Input(tensor.name, tensor.dtype, tensor.shape, image[at : at + tensor.size])
            at += tensor.size
        tensors.append(tensor)
    return Call(bytes(image[: told["head"]]), tuple(tensors), wanted_of(told["wanted"]))


def wanted_of(told: Mapping[str, Any]) -> Wanted:
    """`Wanted` again, after `asdict`."""
    outputs = tuple((name, flag) for name, flag in told["outputs"])
    places = tuple(InRegion(**place) for place in told["places"])
    return Wanted(**{**told, "outputs": outputs, "places": places})
