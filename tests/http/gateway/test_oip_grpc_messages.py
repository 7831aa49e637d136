"""gRPC messages and JSON bodies are read in little time, whatever is in them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidRequest, MalformedBody
from service.gateway.grpc_server import (
    MAX_FIELDS,
    MAX_READ_BYTES,
    message,
    read_message,
    read_request,
)
from service.gateway.models import MODELS
from service.gateway.requests import MAX_VALUES, read_json


def request(**fields: Any) -> Any:
    return message("ModelInferRequest")(**fields)


def many_outputs(into: Any) -> None:
    for _ in range(MAX_FIELDS + 1):
        into.outputs.add()


def many_raw(into: Any) -> None:
    into.raw_input_contents.extend([b""] * (MAX_FIELDS + 1))


def long_shape(into: Any) -> None:
    into.inputs.add(name="q", shape=[1] * (MAX_READ_BYTES + 1))


def many_integers(into: Any) -> None:
    into.inputs.add().contents.uint_contents.extend([1] * (MAX_READ_BYTES + 1))


def long_text(into: Any) -> None:
    into.parameters["id"].string_param = "x" * (MAX_READ_BYTES + 1)


def long_name(into: Any) -> None:
    into.model_name = "x" * (MAX_READ_BYTES + 1)


FILL = [many_outputs, many_raw, long_shape, many_integers, long_text, long_name]


@pytest.mark.parametrize("fill", FILL, ids=lambda one: one.__name__)
def test_a_message_that_takes_long_to_read_is_refused_before(fill: Any) -> None:
    given = request(raw_input_contents=[bytes(2 * MAX_READ_BYTES)])
    fill(given)
    data = given.SerializeToString()
    for one in (data, data[::-1]):
        with pytest.raises(MalformedBody):
            read_message("ModelInferRequest", one)
    with pytest.raises(MalformedBody, match=f"at most {MAX_FIELDS} fields and {MAX_READ_BYTES}"):
        read_request(data)


@pytest.mark.parametrize(
    "end", [b"\x3a\xff", b"\x3a" + b"\xff" * 20, b"\x07\x07", b"\xff", b"\x08"]
)
@pytest.mark.parametrize("size", [10, 2 * MAX_READ_BYTES])
def test_a_message_that_is_cut_off_or_wrong_is_malformed(end: bytes, size: int) -> None:
    data = request(raw_input_contents=[bytes(size)]).SerializeToString()
    assert read_message("ModelInferRequest", data).raw_input_contents == [bytes(size)]
    with pytest.raises(MalformedBody):
        read_message("ModelInferRequest", data + end)


@pytest.mark.parametrize("rank", [9, 100_000])
def test_a_shape_of_many_dimensions_is_refused(rank: int) -> None:
    given = request(model_name="append")
    given.inputs.add(name="k", datatype="FP32", shape=[1] * rank)
    with pytest.raises(InvalidRequest) as caught:
        read_request(given.SerializeToString())
    assert "at most 8 entries" in caught.value.rule and len(str(caught.value)) < 300


def test_parameters_have_a_limit_of_values_together() -> None:
    given = request(model_name="prefill")
    for name in ("offsets", "qo_indptr"):
        given.parameters[name].string_param = "[" + "1," * (MAX_VALUES // 2 + 1) + "1]"
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUES} values together"):
        read_request(given.SerializeToString())
    del given.parameters["offsets"]
    assert len(read_request(given.SerializeToString()).fields["qo_indptr"]) == MAX_VALUES // 2 + 2


def test_json_has_a_bound_of_values() -> None:
    data = [0] * (MAX_VALUES + 2)
    one = {"name": "o", "datatype": "FP32", "shape": [len(data)], "data": data}
    with pytest.raises(MalformedBody, match="send tensors as binary data"):
        read_json(MODELS["merge"], json.dumps({"inputs": [one]}).encode(), memoryview(b""))


def test_what_other_servers_clients_send_is_accepted() -> None:
    """KServe's name the model in the body, MLServer's say how a tensor is encoded."""
    content = {"content_type": "np"}
    entry = {
        "name": "o",
        "datatype": "FP32",
        "shape": [1, 1, 1, 1],
        "data": [1],
        "parameters": content,
    }
    body = {
        "id": "mine",
        "model_name": "merge",
        "model_version": None,
        "parameters": content,
        "inputs": [entry],
        "outputs": [{"name": "o", "parameters": content}],
    }
    read = read_json(MODELS["merge"], json.dumps(body).encode(), memoryview(b""))
    assert (read.id, read.fields, read.outputs) == ("mine", {}, {"o": False})
    np.testing.assert_array_equal(read.arrays["o"], np.ones((1, 1, 1, 1), np.float32))
    with pytest.raises(InvalidRequest, match="the path names merge"):
        read_json(MODELS["merge"], json.dumps(body | {"model_name": "x"}).encode(), memoryview(b""))
    message = request(model_name="merge")
    given = message.inputs.add(name="o", datatype="FP32", shape=[1, 1, 1, 1])
    given.contents.fp32_contents.append(1)
    for one in (message, given, message.outputs.add(name="o")):
        one.parameters["content_type"].string_param = "np"
    assert read_request(message.SerializeToString()).outputs == {"o": True}
