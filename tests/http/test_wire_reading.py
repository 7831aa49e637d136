"""The safetensors reader and writer by themselves: every way a body can lie, and no copies."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import read_safetensors

from service.errors import InvalidRequest, MalformedBody
from service.json_tensors import read_tensors, write_tensors
from service.wire import (
    DTYPES,
    MAX_HEADER_BYTES,
    load_json,
    write_safetensors,
)


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (struct.pack("<Q", 0), "begin with"),
        (struct.pack("<Q", 9) + b"{}      ", "only 8 bytes follow"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "at most"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
        (pack(b" {}"), "begin with"),
        (pack(b"{\xff}"), "UTF-8"),
        (pack(b"{,}"), "not JSON"),
        (pack(b"[]"), "begin with"),
        (pack(b"{} {}"), "not JSON"),
        (pack(b'{"a":1,"a":1}'), "duplicate key 'a'"),
        (pack(b'{"q":{"dtype":"F32","dtype":"F32"}}'), "duplicate key 'dtype'"),
        (pack(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), "too deep"),
        (pack(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
        (pack({"q": 1}), "not an object"),
        (pack({"q": {"dtype": "F32", "shape": [0]}}), "not an object"),
        (pack({"q": {**tensor(), "extra": 1}}, bytes(8)), "not an object"),
        (pack({"q": tensor(dtype="F31")}, bytes(8)), "unknown dtype"),
        (pack({"q": tensor(dtype=7)}, bytes(8)), "unknown dtype"),
        (pack({"q": tensor(dtype=["F32"])}, bytes(8)), "unknown dtype"),
        (pack({"q": tensor(2)}, bytes(8)), "shape is not"),
        (pack({"q": tensor([-2])}, bytes(8)), "shape is not"),
        (pack({"q": tensor([True, 2])}, bytes(8)), "shape is not"),
        (pack({"q": tensor([2.0])}, bytes(8)), "shape is not"),
        (pack({"q": tensor([2**63])}, bytes(8)), "shape is not"),
        (pack({"q": tensor([1] * 9, 0, 4)}, bytes(4)), "shape is not"),
        (pack({"q": tensor([2**62, 2**62, 2])}, bytes(8)), "too large"),
        (pack({"q": tensor([2**40, 2**40, 0], 0, 0)}), "too large"),
        (pack({"q": tensor([3])}, bytes(8)), "12 bytes"),
        (pack({"q": tensor([1])}, bytes(8)), "4 bytes"),
        (pack({"q": {**tensor(), "data_offsets": [0]}}, bytes(8)), "two counts"),
        (pack({"q": {**tensor(), "data_offsets": [0, 4, 8]}}, bytes(8)), "two counts"),
        (pack({"q": tensor(begin=-4, end=4)}, bytes(8)), "two counts"),
        (pack({"q": tensor(begin=8, end=0)}, bytes(8)), "outside"),
        (pack({"q": tensor(begin=0, end=8)}, bytes(7)), "outside"),
        (pack({"q": tensor(begin=2**62, end=2**62 + 8)}, bytes(8)), "outside"),
        (pack({"q": tensor()}, bytes(9)), "1 trailing bytes"),
        (pack({}, bytes(1)), "1 trailing bytes"),
        (pack({"q": tensor(begin=4, end=12)}, bytes(12)), "leaves a hole"),
        (pack({"q": tensor(), "k": tensor(begin=4, end=12)}, bytes(12)), "overlaps"),
        (pack({"q": tensor(), "k": tensor()}, bytes(8)), "overlaps"),
        (pack({"q": tensor(), "k": tensor(begin=12, end=20)}, bytes(20)), "leaves a hole"),
        (pack({"m": tensor([2], 0, 2, "BOOL")}, b"\1\2"), "neither 0 nor 1"),
        (pack({str(i): tensor([0], 0, 0) for i in range(65)}), "at most 64"),
        (pack({"__metadata__": 1}), "object of strings"),
        (pack({"__metadata__": {"request": 1}}), "object of strings"),
        (pack({"__metadata__": {"request": "{"}}), "not JSON"),
        (pack({"__metadata__": {"request": "[]"}}), "not a JSON object"),
        (pack({"__metadata__": {"request": '{"a":NaN}'}}), "NaN is not JSON"),
        (pack({"__metadata__": {"request": '{"a":-Infinity}'}}), "not JSON"),
        (pack({"__metadata__": {"request": '{"a":1,"a":1}'}}), "duplicate key"),
        (pack({"__metadata__": {"request": "\ud800"}}), "Unicode"),
    ],
)
def test_a_body_that_lies_is_refused_with_the_reason(body: bytes, told: str) -> None:
    with pytest.raises(MalformedBody, match=told):
        read_safetensors(body)
    with pytest.raises(MalformedBody):
        read_safetensors(memoryview(body))


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_comes_through_as_a_view(name: str) -> None:
    dtype = DTYPES[name]
    values = np.arange(6).reshape(2, 3).astype(dtype)
    if name == "BOOL":
        values = np.array([[True, False, True], [False, False, True]])
    body = pack({"x": tensor([2, 3], 0, values.nbytes, name)}, values.tobytes())
    body = body.replace(b"{", b"{" + b" " * (-(len(body) - values.nbytes) % 8), 1)
    body = struct.pack("<Q", len(body) - 8 - values.nbytes) + body[8:]
    message = read_safetensors(body)
    told = message.tensors["x"]
    assert told.dtype == dtype and not told.flags.owndata, "a view onto the body"
    np.testing.assert_array_equal(told, values)


def test_an_unaligned_tensor_is_copied_and_equal() -> None:
    values = np.arange(4, dtype=np.float32)
    header = {"m": tensor([1], 0, 1, "U8"), "x": tensor([4], 1, 17)}
    told = read_safetensors(pack(header, b"\7" + values.tobytes())).tensors
    assert told["x"].flags.aligned
    np.testing.assert_array_equal(told["x"], values)


def test_fields_are_optional_and_empty_tensors_and_scalars_legal() -> None:
    header = {"e": tensor([0, 5], 4, 4), "s": tensor([], 0, 4), "z": tensor([2, 0], 0, 0)}
    message = read_safetensors(pack(header, struct.pack("<f", 2.5)))
    assert message.fields == {}
    assert message.tensors["e"].shape == (0, 5) and message.tensors["s"] == np.float32(2.5)


def test_what_is_written_the_library_reads() -> None:
    arrays = {
        "o": np.arange(15).reshape(5, 3).astype(np.float16),
        "b": np.array([True, False, True]),
        "lse": np.array([[-np.inf, 1.0]], np.float32),
        "e": np.zeros((0, 3), np.float32),
    }
    parts = write_safetensors('{"a":"\\"\\u00e9"}', arrays)
    body = b"".join(parts)
    told = safetensors.numpy.load(body)
    for name, array in arrays.items():
        np.testing.assert_array_equal(told[name], array, name)
    (length,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + length])
    assert json.loads(header["__metadata__"]["response"]) == {"a": '"\u00e9'}
    for name, array in arrays.items():
        begin = 8 + length + header[name]["data_offsets"][0]
        assert begin % array.itemsize == 0, f"{name} lies aligned"


def test_large_tensors_are_neither_read_nor_written_by_copy() -> None:
    array = np.zeros(2**24, np.uint8)
    body = bytes(safetensors.numpy.save({"x": array}, {"request": "{}"}))
    tracemalloc.start()
    tensors = read_safetensors(body).tensors
    parts = write_safetensors("{}", tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**17, peak
    assert sum(map(len, parts)) > 2**24


def test_json_tensors_survive_a_round_trip() -> None:
    arrays = {
        "f": np.array([[1.5, -np.inf], [np.inf, 0.1]], np.float32),
        "h": np.array([65504, -0.0], np.float16),
        "b": np.array([3.140625, 1e30]).astype(ml_dtypes.bfloat16),
        "m": np.array([True, False]),
        "u": np.arange(3, dtype=np.uint8),
        "e": np.zeros((2, 0), np.int32),
    }
    text = json.dumps(write_tensors(arrays), allow_nan=False)
    told = read_tensors(load_json(text.encode(), "the body"))
    for name, array in arrays.items():
        assert told[name].dtype == array.dtype and told[name].shape == array.shape, name
        np.testing.assert_array_equal(told[name], array, name)
    assert np.isnan(read_tensors({"n": {"dtype": "F32", "shape": [1], "data": ["NaN"]}})["n"][0])


GOOD = pack(
    {
        "__metadata__": {"request": '{"layer":0,"sequences":["a"]}'},
        "q": tensor([2, 2], 0, 16),
        "m": tensor([4], 16, 20, "BOOL"),
    },
    bytes(20),
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_bodies_are_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    body = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        match data.draw(st.sampled_from(("set", "cut", "insert", "length"))):
            case "set" if at < len(body):
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 16))]
            case "insert":
                body[at:at] = data.draw(st.binary(max_size=16))
            case _:
                body[:8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    try:
        message = read_safetensors(bytes(body))
    except MalformedBody:
        return
    assert sum(array.nbytes for array in message.tensors.values()) <= len(body)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F31", ""]),
        "shape": st.lists(
            st.integers(-1, 5) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64]), max_size=5
        ),
        "data_offsets": st.lists(
            st.integers(-1, 40) | st.sampled_from([2**31, 2**63, 2**64]), min_size=1, max_size=3
        ),
    }
)


@given(st.dictionaries(st.text(max_size=3), ENTRY, max_size=4), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_header_is_read_within_the_bodys_memory_or_refused(
    header: dict[str, Any], data: bytes
) -> None:
    body = pack(header, data)
    tracemalloc.start()
    try:
        message = read_safetensors(body)
    except MalformedBody:
        pass
    else:
        assert sum(array.nbytes for array in message.tensors.values()) == len(data)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**20, peak


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
