"""JSON bodies: strictly made into images, made of images in pieces, and refused when hostile."""

from __future__ import annotations

import json
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attnd.wire.bounds import MAX_JSON_VALUES
from hypothesis import given, settings
from hypothesis import strategies as st
from images import Image, read_image, write_image

from service.errors import AttndError, InvalidRequest, MalformedBody
from service.image.json_body import fields_text_of_image, image_of_json, json_of_image
from service.image.json_tensors import cut_data


def read_json(body: bytes, **given: Any) -> Image:
    return read_image(b"".join(image_of_json(body, given)))


def read_tensors(tensors: Any) -> dict[str, Any]:
    return read_json(json.dumps({"tensors": tensors}).encode()).tensors


ARRAYS: dict[str, Any] = {
    "f": np.array([[1.5, -np.inf], [np.inf, 0.1]], np.float32),
    "h": np.array([65504, -0.0], np.float16),
    "b": np.array([3.140625, 1e30]).astype(ml_dtypes.bfloat16),
    "m": np.array([True, False]),
    "u": np.arange(3, dtype=np.uint8),
    "n": np.array([np.nan, 1.0], np.float64),
    "e": np.zeros((2, 0), np.int32),
    "large": np.arange(20_001, dtype=np.float32) / 3,
    "whole": np.arange(-20_000, 20_000, dtype=np.int32),
}


def test_tensors_survive_the_way_to_json_and_back() -> None:
    text = json_of_image(memoryview(write_image({"a": 1}, ARRAYS, "response")))
    assert json.loads(text)["a"] == 1
    found = read_json(text)
    assert found.fields == {"a": 1}
    for name, array in ARRAYS.items():
        assert found.tensors[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found.tensors[name], array, name)


def test_an_answer_without_tensors_is_its_fields() -> None:
    text = '{"lengths":[1,2],"b":"\\u00e9"}'
    body = write_image(json.loads(text), key="response")
    assert json.loads(json_of_image(body)) == json.loads(text)
    assert json.loads(fields_text_of_image(memoryview(body))) == json.loads(text)


def test_an_answer_without_fields_is_its_tensors() -> None:
    body = write_image({}, {"m": np.array([True])}, "response")
    assert json.loads(json_of_image(body)) == {
        "tensors": {"m": {"dtype": "BOOL", "shape": [1], "data": [True]}}
    }


def test_an_answer_may_have_more_fields_than_a_request() -> None:
    fields = {"sequences": [{"lengths": [[i]]} for i in range(70_000)]}
    body = write_image(fields, key="response")
    assert json.loads(fields_text_of_image(body)) == fields
    assert json.loads(json_of_image(body)) == fields


def test_problems_are_read_under_their_key() -> None:
    body = write_image({"code": "internal"}, key="problem")
    assert json.loads(fields_text_of_image(body, "problem")) == {"code": "internal"}


def test_values_of_path_and_query_become_fields() -> None:
    found = read_json(b'{"length": 3}', id="a", limit=2)
    assert found.fields == {"length": 3, "id": "a", "limit": 2}


def test_a_field_that_the_path_gives_too_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="by the path or query") as reply:
        read_json(b'{"length": 3, "id": "b"}', id="a")
    assert reply.value.field == "id"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"1",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'"\xff"',
        b'{"\xff": 1}',
        b"[" * 100_000,
        b'{"a":' * 60_000,
        b'{"tensors": {"q": {"dtype": "F32", "dtype": "F32", "shape": [1], "data": [1]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [1,]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [,1]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [1 1]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [NaN]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [01]}}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [1}]}}',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [1',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": [1]}}} 1',
        b'{"tensors": {"q": {"dtype": "F32", "shape": [1], "data": ["\xff"]}}}',
    ],
)
def test_json_that_is_not_strict_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        image_of_json(body, {})


HOSTILE = {
    "lists": b"[" + b"[]," * 60_000 + b"1]",
    "objects": b'{"sequences":[' + b"{}," * 60_000 + b"1]}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(60_000)) + b"}",
    "values": b'{"sequences":[' + b"1," * 100_000 + b"1]}",
    "text": b'{"sequences":"' + b"x" * 500_000 + b'"}',
    "data": b'{"a":[' + b'{"data":[]},' * 5_000 + b"1]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_with_more_of_anything_than_a_request_has_is_malformed(name: str) -> None:
    with pytest.raises(MalformedBody, match="at most"):
        image_of_json(HOSTILE[name], {})


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        ({"dtype": "F99", "shape": [], "data": []}, ".dtype"),
        ({"dtype": 7, "shape": [], "data": []}, ".dtype"),
        ({"dtype": "F32", "shape": [2], "data": [1]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": []}, ".data"),
        ({"dtype": "F32", "shape": [], "data": 1}, ".data"),
        ({"dtype": "F32", "shape": [], "data": "0"}, ".data"),
        ({"dtype": "F32", "shape": [-1], "data": []}, ".shape"),
        ({"dtype": "F32", "shape": [True], "data": [1]}, ".shape"),
        ({"dtype": "F32", "shape": [2**62, 2**62, 0], "data": []}, ".shape"),
        ({"dtype": "F32", "shape": [1], "data": ["1"]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": ["]"]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": [True]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": [None]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": [[1]]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": [{"a": 1}]}, ".data"),
        ({"dtype": "F16", "shape": [1], "data": [70000]}, ".data"),
        ({"dtype": "F32", "shape": [1], "data": [10**400]}, ".data"),
        ({"dtype": "U8", "shape": [1], "data": [256]}, ".data"),
        ({"dtype": "U8", "shape": [1], "data": [10**400]}, ".data"),
        ({"dtype": "U8", "shape": [1], "data": [1.0]}, ".data"),
        ({"dtype": "BOOL", "shape": [1], "data": [2]}, ".data"),
        ({"dtype": "F32", "shape": [1]}, ""),
        ([1.0], ""),
    ],
)
def test_a_tensor_that_breaks_a_rule_is_named(tensor: Any, field: str) -> None:
    with pytest.raises(AttndError) as reply:
        read_tensors({"q": tensor})
    if isinstance(tensor, dict) and tensor.get("data") == ["]"]:
        assert isinstance(reply.value, MalformedBody), "a bracket inside data ends it"
    else:
        assert isinstance(reply.value, InvalidRequest)
        assert reply.value.field == f"tensors.q{field}"


def test_a_tensor_with_other_keys_is_shown_by_its_keys() -> None:
    with pytest.raises(InvalidRequest) as reply:
        read_tensors({"q": {"dtype": "F32", "data": [1]}})
    assert reply.value.value == "['data', 'dtype']"


@pytest.mark.parametrize("size", [5000, 100_000])
def test_an_integer_that_is_too_long_is_named_as_such(size: int) -> None:
    with pytest.raises(MalformedBody, match="is not JSON: an integer is too long"):
        image_of_json(b'{"layer": 1%b}' % (b"0" * size), {})


@pytest.mark.parametrize("data", ["1e400", "1, -1e400", '"NaN", 1e400'])
@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
def test_a_number_that_no_float_holds_is_not_made_infinite(data: str, dtype: str) -> None:
    shape = data.count(",") + 1
    tensor = f'{{"dtype": "{dtype}", "shape": [{shape}], "data": [{data}]}}'
    with pytest.raises(InvalidRequest, match="does not fit"):
        read_json(f'{{"tensors": {{"q": {tensor}}}}}'.encode())


def test_a_field_that_no_float_holds_is_named() -> None:
    with pytest.raises(InvalidRequest, match="finite") as reply:
        read_json(b'{"layer": 0, "levels": [{"a": 1e400}]}')
    assert reply.value.field == "levels"


def test_too_many_tensors_are_refused() -> None:
    one = {"dtype": "F32", "shape": [0], "data": []}
    with pytest.raises(InvalidRequest, match="at most 64 tensors"):
        read_tensors({str(i): one for i in range(65)})


def test_a_field_or_an_id_named_data_is_left_alone() -> None:
    body = {"data": [[1], "data"], "b": {"data": "data"}, "c": '"data": [1, 2]'}
    assert read_json(json.dumps(body).encode()).fields == body


@pytest.mark.parametrize("space", ["", " ", "\n\t  \r\n"])
def test_white_space_is_allowed_anywhere(space: str) -> None:
    one = f'{{"dtype":"F32","shape":[3],"data"{space}:{space}[{space}1{space},{space}2,3{space}]}}'
    found = read_json(f'{space}{{"tensors":{{"q":{one}}}}}{space}'.encode())
    assert found.tensors["q"].tolist() == [1.0, 2.0, 3.0]


def test_a_body_of_more_numbers_than_the_bound_is_refused_with_the_remedy() -> None:
    most = [1] * (MAX_JSON_VALUES - 1)
    tensor = {"dtype": "I32", "shape": [len(most)], "data": most}
    assert read_tensors({"q": tensor})["q"].tolist() == most
    more = json.dumps({"tensors": {"q": tensor | {"data": [*most, 1]}}}).encode()
    with pytest.raises(MalformedBody, match=r"65537 values: at most 65536: send safetensors"):
        read_json(more)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data", "x"]), JSON_VALUES))
@settings(max_examples=200, deadline=None)
def test_any_json_tensor_is_read_or_refused(entry: dict[str, Any]) -> None:
    try:
        read_tensors({"q": entry})
    except InvalidRequest as error:
        assert error.field.startswith("tensors.q"), error
    except MalformedBody:
        pass


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123dat ', max_size=60).map(str.encode))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_read_as_json_reads_them_or_refused(body: bytes) -> None:
    try:
        found = read_json(body)
    except AttndError:
        return
    document = json.loads(body)
    document.pop("tensors", None)
    assert found.fields == document


def test_many_beginnings_of_lists_take_no_longer_than_one() -> None:
    def seconds(count: int) -> float:
        body = b'{"tensors":{' + b'"data":[' * count + b" " * 2**24
        began = time.process_time()
        for closing in (b"", b"]"):
            cut_data(body + closing, "mark")
        return time.process_time() - began

    assert seconds(1000) < 50 * seconds(1)
