"""The reader of images: false headers, the cost of reading, and no copies."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from attnd.wire.bounds import MAX_HEADER_BYTES, MAX_TOUCHED_BYTES, MAX_VALUES
from attnd.wire.dtypes import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from images import entry, pack, read_image, write_image

from service.errors import MalformedBody
from service.image.reading import place, read_layout, split


@pytest.mark.parametrize(
    ("body", "detail"),
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
        (pack(b'{"a":' * 8000 + b"1" + b"}" * 8000), "too deep"),
        (pack(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
        (pack({"q": 1}), "not an object"),
        (pack({"q": {"dtype": "F32", "shape": [0]}}), "not an object"),
        (pack({"q": {**entry(), "extra": 1}}, bytes(8)), "not an object"),
        (pack({"q": entry(dtype="F31")}, bytes(8)), "unknown dtype"),
        (pack({"q": entry(dtype=7)}, bytes(8)), "unknown dtype"),
        (pack({"q": entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
        (pack({"q": entry(2)}, bytes(8)), "shape is not"),
        (pack({"q": entry([-2])}, bytes(8)), "shape is not"),
        (pack({"q": entry([True, 2])}, bytes(8)), "shape is not"),
        (pack({"q": entry([2.0])}, bytes(8)), "shape is not"),
        (pack({"q": entry([2**63])}, bytes(8)), "shape is not"),
        (pack({"q": entry([1] * 9, 0, 4)}, bytes(4)), "shape is not"),
        (pack({"q": entry([2**62, 2**62, 2])}, bytes(8)), "too large"),
        (pack({"q": entry([2**40, 2**40, 0], 0, 0)}), "too large"),
        (pack({"q": entry([3])}, bytes(8)), "12 bytes"),
        (pack({"q": entry([1])}, bytes(8)), "4 bytes"),
        (pack({"q": {**entry(), "data_offsets": [0]}}, bytes(8)), "two counts"),
        (pack({"q": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)), "two counts"),
        (pack({"q": entry(begin=-4, end=4)}, bytes(8)), "two counts"),
        (pack({"q": entry(begin=8, end=0)}, bytes(8)), "outside"),
        (pack({"q": entry(begin=0, end=8)}, bytes(7)), "outside"),
        (pack({"q": entry(begin=2**62, end=2**62 + 8)}, bytes(8)), "outside"),
        (pack({"q": entry()}, bytes(9)), "1 trailing bytes"),
        (pack({}, bytes(1)), "1 trailing bytes"),
        (pack({"q": entry(begin=4, end=12)}, bytes(12)), "leaves a hole"),
        (pack({"q": entry(), "k": entry(begin=4, end=12)}, bytes(12)), "overlaps"),
        (pack({"q": entry(), "k": entry()}, bytes(8)), "overlaps"),
        (pack({"q": entry(), "k": entry(begin=12, end=20)}, bytes(20)), "leaves a hole"),
        (pack({"m": entry([2], 0, 2, "BOOL")}, b"\1\2"), "neither 0 nor 1"),
        (pack({str(i): entry([0], 0, 0) for i in range(65)}), "at most 64"),
        (pack({"__metadata__": 1}), "object of strings"),
        (pack({"__metadata__": {"request": 1}}), "object of strings"),
        (pack({"__metadata__": {"request": "{"}}), "not JSON"),
        (pack({"__metadata__": {"request": "[]"}}), "not a JSON object"),
        (pack({"__metadata__": {"request": '{"a":NaN}'}}), "NaN is not JSON"),
        (pack({"__metadata__": {"request": '{"a":-Infinity}'}}), "not JSON"),
        (pack({"__metadata__": {"request": '{"a":1,"a":1}'}}), "duplicate key"),
        (pack({"__metadata__": {"request": "\ud800"}}), "Unicode"),
        (pack(b'{"a":[' + b"[]," * 4096 + b"1]}"), "4097 lists: at most 4096: send fewer"),
        (pack(b'{"a":[' + b"{}," * 8192 + b"1]}"), "8193 objects: at most 8192: send fewer"),
        (
            pack(b'{"a":[' + b"1," * MAX_VALUES + b"1,1]}"),
            "32769 values: at most 32768",
        ),
        (pack({str(i): i for i in range(129)}), "129 keys: at most 128"),
        (pack({"__metadata__": {"request": "[" * 5000}}), "lists: at most"),
        (
            pack(b'{"__metadata__":{"request":"{\\"a\\":[' + b"\\u005b\\u005d," * 5000 + b'1]}"}}'),
            "__metadata__.request has 5001 lists",
        ),
    ],
)
def test_a_false_body_is_refused_with_the_reason(body: bytes, detail: str) -> None:
    with pytest.raises(MalformedBody, match=detail):
        read_image(body)
    with pytest.raises(MalformedBody):
        read_image(memoryview(body))


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_comes_through_as_a_view(name: str) -> None:
    dtype = DTYPES[name]
    values = np.arange(6).reshape(2, 3).astype(dtype)
    if name == "BOOL":
        values = np.array([[True, False, True], [False, False, True]])
    body = pack({"x": entry([2, 3], 0, values.nbytes, name)}, values.tobytes())
    body = body.replace(b"{", b"{" + b" " * (-(len(body) - values.nbytes) % 8), 1)
    body = struct.pack("<Q", len(body) - 8 - values.nbytes) + body[8:]
    read = read_image(body)
    detail = read.tensors["x"]
    assert detail.dtype == dtype and not detail.flags.owndata, "a view onto the body"
    np.testing.assert_array_equal(detail, values)


@pytest.mark.parametrize(("dtype", "shift"), [("BOOL", 0), ("U8", 0), ("F32", 1), ("F32", 0)])
def test_as_much_as_is_checked_or_copied_in_some_milliseconds(dtype: str, shift: int) -> None:
    """More is refused where it is BOOL or unaligned; all else are views."""
    is_touched = dtype == "BOOL" or shift > 0
    for more in (0, 4):
        size = MAX_TOUCHED_BYTES + more
        shape = [size // DTYPES[dtype].itemsize]
        header = json.dumps({"x": entry(shape, 0, size, dtype)}).encode()
        header += b" " * (-len(header) % 8 + shift)
        body = memoryview(bytearray(pack(header, bytes(size))))
        if is_touched and more:
            with pytest.raises(MalformedBody, match="at most 16777216: send packed_mask"):
                read_image(body)
        else:
            assert (read_image(body).tensors["x"].base is None) == (shift > 0)


def test_an_unaligned_tensor_is_copied_and_equal() -> None:
    values = np.arange(4, dtype=np.float32)
    header = {"m": entry([1], 0, 1, "U8"), "x": entry([4], 1, 17)}
    detail = read_image(pack(header, b"\7" + values.tobytes())).tensors
    assert detail["x"].flags.aligned
    np.testing.assert_array_equal(detail["x"], values)


def test_fields_are_optional_and_empty_tensors_and_scalars_legal() -> None:
    header = {"e": entry([0, 5], 4, 4), "s": entry([], 0, 4), "z": entry([2, 0], 0, 0)}
    read = read_image(pack(header, struct.pack("<f", 2.5)))
    assert read.fields == {}
    assert read.tensors["e"].shape == (0, 5) and read.tensors["s"] == np.float32(2.5)


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
@settings(max_examples=80, deadline=None)
def test_any_header_is_read_within_the_bodys_memory_or_refused(
    header: dict[str, Any], data: bytes
) -> None:
    body = pack(header, data)
    tracemalloc.start()
    try:
        read = read_image(body)
    except MalformedBody:
        pass
    else:
        assert sum(array.nbytes for array in read.tensors.values()) == len(data)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**20, peak


def test_large_tensors_are_not_copied() -> None:
    body = bytes(safetensors.numpy.save({"x": np.zeros(2**24, np.uint8)}, {"request": "{}"}))
    tracemalloc.start()
    tensors = read_image(body).tensors
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensors["x"].nbytes == 2**24 and peak < 2**17, peak


def test_the_header_is_a_copy_that_its_writer_cannot_reach() -> None:
    memory = bytearray(write_image({"layer": 1}, {"x": np.zeros(2, np.float32)}))
    header, start = split(memoryview(memory))
    memory[8:start] = b"#" * (start - 8)
    assert read_layout(header, len(memory) - start).fields == {"layer": 1}


def test_tensors_are_views_of_the_body() -> None:
    memory = bytearray(write_image({}, {"x": np.zeros(2, np.float32)}))
    header, start = split(memoryview(memory))
    x = place(memoryview(memory), start, read_layout(header, len(memory) - start))["x"]
    memory[start : start + 4] = struct.pack("<f", 1.5)
    assert x.tolist() == [1.5, 0.0]


def test_bytes_of_masks_are_checked_for_every_image_of_a_known_header() -> None:
    memory = bytearray(write_image({}, {"m": np.ones(3, bool)}))
    header, start = split(memory)
    layout = read_layout(header, len(memory) - start)
    assert place(memory, start, layout)["m"].all()
    memory[-1] = 7
    with pytest.raises(MalformedBody, match="neither 0 nor 1"):
        place(memory, start, layout)


@pytest.mark.parametrize("key", ["request", "response", "problem"])
def test_fields_are_read_under_the_key_asked_for(key: str) -> None:
    body = write_image({"a": 1}, key=key)
    assert read_image(body, key).fields == {"a": 1}
    assert read_image(body, "else").fields == {}


def test_the_longest_header_is_read() -> None:
    text = json.dumps({"__metadata__": {"request": "{}"}})
    header = text[:-1] + " " * (MAX_HEADER_BYTES - len(text)) + "}"
    assert read_image(pack(header.encode())).fields == {}
