"""The codec of images, against the safetensors library and the service's own writer."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from attnd.wire import images
from attnd.wire.dtypes import DTYPES
from attnd.wire.images import request_image

from service.image.writing import image
from tests.client.client_stub import read_safetensors


def reply_body(fields: object, arrays: dict[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save(arrays, {"response": json.dumps(fields)})


def received(body: bytes) -> images.Bytes:
    return np.frombuffer(bytearray(body), np.uint8)


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("shape", [(3, 2, 5), (0, 4), (1,)])
def test_every_dtype_travels_both_ways_unchanged(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[name])
    fields = {"layer": 1, "sequences": ["a", "ü"]}
    message = read_safetensors(b"".join(request_image(fields, {"x": array})))
    assert message.fields == fields
    assert message.tensors["x"].dtype == array.dtype
    assert message.tensors["x"].tobytes() == array.tobytes()

    body = b"".join(image("response", json.dumps({"lengths": [1]}), {"x": array, "y": array}))
    answer, arrays = images.decode(received(body))
    assert answer == {"lengths": [1]}
    assert arrays["y"].dtype == array.dtype
    assert arrays["y"].shape == shape
    assert arrays["y"].tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_travel_by_value() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    message = read_safetensors(b"".join(request_image({}, {"x": array})))
    np.testing.assert_array_equal(message.tensors["x"], array)


def test_what_comes_back_may_be_written_to() -> None:
    _, arrays = images.decode(received(reply_body({}, {"x": np.zeros(4, np.float32)})))
    arrays["x"] += 1
    assert arrays["x"].sum() == 4


class Base(StrEnum):
    TWO = "2"


@pytest.mark.parametrize("offsets", [None, [0], [5, 2**40]])
def test_fields_are_written_as_they_are_however_like_those_before(offsets: Any) -> None:
    values = [
        True,
        1,
        1.0,
        np.float64(1.0),
        np.float64(0.1),
        "1",
        '\\"',
        Base.TWO,
        [1],
        {"a": None},
    ]
    for value in [*values, *values]:
        fields = {"layer": value, **({} if offsets is None else {"offsets": offsets})}
        fields_read = read_safetensors(b"".join(request_image(fields, {}))).fields
        assert fields_read == fields
        assert json.dumps(fields_read["layer"]) == json.dumps(value)


def test_more_headers_than_are_remembered_are_all_right() -> None:
    for layer in [*range(2 * images.MAX_REMEMBERED), 0]:
        names = ["a-name-longer-than-most"] * (1000 if layer % 100 == 0 else 1)
        fields = {"layer": layer, "sequences": names}
        assert read_safetensors(b"".join(request_image(fields, {}))).fields == fields


def test_a_field_that_json_does_not_have_is_a_type_error() -> None:
    for _ in range(2):
        with pytest.raises(TypeError):
            request_image({"layer": np.int64(1)}, {})


def test_a_dtype_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="k has dtype complex64"):
        request_image({}, {"k": np.zeros(3, np.complex64)})
    with pytest.raises(TypeError, match="float8_e4m3b11fnuz"):
        request_image({}, {"k": np.zeros(3, ml_dtypes.float8_e4m3b11fnuz)})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 64,
        reply_body({}, {"x": np.zeros(4, np.float32)})[:-1],
        safetensors.numpy.save({}, {}),
        reply_body([1], {}),
        safetensors.numpy.save({}, {"response": "{"}),
        reply_body({}, {"x": np.zeros(4, np.uint8)}).replace(b'"U8"', b'"C8"'),
    ],
)
def test_a_body_that_is_not_an_answer_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        images.decode(received(body))
