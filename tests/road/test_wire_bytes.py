"""The bytes on the wire, written out: programs in other languages send and read them."""

from __future__ import annotations

import numpy as np
import pytest
from attnd.wire import frames as f
from attnd.wire import images
from attnd.wire.images import request_image

ID = bytes(range(16))
FRAMES = {
    "CALL": (
        f.CALL_FRAME.pack(f.CALL, 0, 64, 7, 9, 3, 1500, 128, 2200, 4096, 8192, ID),
        "0100 0000 40000000 0700000000000000 0900 0300 dc050000 8000000000000000 9808000000000000"
        "0010000000000000 0020000000000000 000102030405060708090a0b0c0d0e0f",
    ),
    "ANSWER": (
        f.ANSWER_FRAME.pack(
            *(f.ANSWER, 0, 56, 7, 200, f.HELD, 70_000, 640, 0), *(0.5, 0.25, 0.0, 2.0, 0.0, 0.125)
        ),
        "0200 0000 38000000 0700000000000000 c800 0200 70110100 8002000000000000 0000000000000000"
        "0000003f 0000803e 00000000 00000040 00000000 0000003e",
    ),
    "CANCEL": (f.cancel_frame(7), "0300 0000 08000000 0700000000000000"),
    "GROW": (
        f.json_frame(f.GROW, {"arena_bytes": 65536}),
        "1200 0000 15000000" + b'{"arena_bytes":65536}'.hex(),
    ),
    "STEP": (
        f.step_frame(7, 1500, ID, b"{}"),
        "1900 0000 22000000 0700000000000000 dc050000 00000000 000102030405060708090a0b0c0d0e0f"
        "7b7d",
    ),
    "OPENED": (
        f.opened_frame(7, {"levels": 2}),
        "1a00 0000 14000000 0700000000000000" + b'{"levels":2}'.hex(),
    ),
    "READY": (
        f.layer_frame(f.READY, 7, 3),
        "1b00 0000 10000000 0700000000000000 03000000 00000000",
    ),
    "DONE": (f.layer_frame(f.DONE, 7, 3), "1c00 0000 10000000 0700000000000000 03000000 00000000"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_has_these_bytes(name: str) -> None:
    packed, expected = FRAMES[name]
    assert packed == bytes.fromhex(expected)


def test_the_image_of_a_request_has_these_bytes() -> None:
    arrays = {"k": np.ones((1, 1, 2), np.float16), "q": np.ones((1, 1, 2), np.float32)}
    fields = {"layer": 3, "sequences": ["a"], "offsets": [5]}
    assert b"".join(request_image(fields, arrays)) == (
        b"\xc8\0\0\0\0\0\0\0"
        rb'{"__metadata__":{"request":"{\"layer\":3,\"sequences\":[\"a\"],\"offsets\":[5]}"},'
        b'"q":{"dtype":"F32","shape":[1,1,2],"data_offsets":[0,8]},'
        b'"k":{"dtype":"F16","shape":[1,1,2],"data_offsets":[8,12]}}   '
        b"\0\0\x80?\0\0\x80?\0<\0<"
    )


def test_the_header_of_an_answer_has_these_bytes() -> None:
    tensors = (("o", np.dtype(np.float32), (1, 4)),)
    assert images.header("response", '{"lengths":[6]}', tensors) == (
        b'p\0\0\0\0\0\0\0{"__metadata__":{"response":'
        rb'"{\"lengths\":[6]}"},'
        b'"o":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}}       '
    )
