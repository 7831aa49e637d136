"""The writer of images: read by the library, aligned, not copied, and laid in place."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from attnd.wire.dtypes import DTYPES
from attnd.wire.images import header
from hypothesis import given, settings
from hypothesis import strategies as st
from images import read_image

from service.image.writing import image, in_order, lay, shaped, size

ARRAYS: dict[str, Any] = {
    "o": np.arange(15).reshape(5, 3).astype(np.float16),
    "b": np.array([True, False, True]),
    "lse": np.array([[-np.inf, 1.0]], np.float32),
    "e": np.zeros((0, 3), np.float32),
}
TEXT = '{"a":"\\"\\u00e9"}'


def test_the_library_reads_written_images() -> None:
    body = b"".join(image("response", TEXT, ARRAYS))
    found = safetensors.numpy.load(body)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, name)
    (length,) = struct.unpack("<Q", body[:8])
    document = json.loads(body[8 : 8 + length])
    assert json.loads(document["__metadata__"]["response"]) == {"a": '"\u00e9'}


def test_every_tensor_is_aligned() -> None:
    body = b"".join(image("response", TEXT, ARRAYS))
    (length,) = struct.unpack("<Q", body[:8])
    document = json.loads(body[8 : 8 + length])
    for name, array in ARRAYS.items():
        begin = 8 + length + document[name]["data_offsets"][0]
        assert begin % array.itemsize == 0, name


def test_large_tensors_are_not_copied() -> None:
    tracemalloc.start()
    parts = image("response", "{}", {"x": np.zeros(2**24, np.uint8)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, parts)) > 2**24
    assert peak < 2**24 + 2**17, peak


def test_tensors_can_be_filled_in_place() -> None:
    tensors = in_order(shaped(ARRAYS))
    head = header("response", TEXT, tensors)
    memory = memoryview(bytearray(size(head, tensors)))
    for name, place in lay(memory, head, tensors).items():
        assert place.flags.aligned and place.flags.writeable, name
        place[...] = ARRAYS[name]
    assert bytes(memory) == b"".join(image("response", TEXT, ARRAYS))
    found = read_image(memory, "response").tensors
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_memory_that_is_too_small_is_refused() -> None:
    tensors = in_order(shaped(ARRAYS))
    head = header("response", "{}", tensors)
    for room in (len(head) - 1, size(head, tensors) - 1):
        with pytest.raises((ValueError, TypeError)):
            lay(memoryview(bytearray(room)), head, tensors)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    ),
    st.text(max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_any_tensors_and_fields_come_back(shapes: dict[str, Any], detail: str) -> None:
    arrays = {name: np.ones(shape, DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}
    found = read_image(b"".join(image("request", json.dumps({"a": detail}), arrays)))
    assert found.fields == {"a": detail}
    assert found.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(found.tensors[name], array, name)
