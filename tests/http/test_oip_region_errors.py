"""Requests whose tensors do not lie where they say: refused, told, and nothing is changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import HEAD_DIM, KV_HEADS, LAYERS, QO_HEADS, WIRE_DTYPE, rows
from http_service import Service, serving, wait_for
from regions import (
    Region,
    in_region,
    infer,
    memory,
    packed,
    refusal,
    registered,
    to_region,
)
from test_oip_numbers import fill
from triton_callers import Triton, grpc_client, grpc_door, http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from service.doors.grpc.server import Server

ROW = QO_HEADS * HEAD_DIM * WIRE_DTYPE.itemsize
"""Bytes of one row of q, or o."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--server.client-shm", "true", "--server.client-shm-regions", "8") as running:
        yield running


@pytest.fixture
def region(triton: Triton) -> Iterator[Region]:
    with registered(triton, 8192) as one:
        yield one


def an_append(triton: Triton, *inputs: Any) -> Any:
    return infer(triton, "append", list(inputs), layer=0, sequences=["a"])


def test_an_input_that_does_not_lie_where_it_says_changes_nothing(
    triton: Triton, region: Region, rng: np.random.Generator
) -> None:
    k = rows(rng, 1)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    good = triton.input("v", k)

    def placed(size: int, offset: int = 0, name: str = region.name) -> Any:
        made = triton.module.InferInput("k", k.shape, np_to_triton_dtype(k.dtype))
        return made.set_shared_memory(name, size, offset=offset)

    def told(given: Any) -> str:
        return refusal(an_append, triton, given, good)

    size = k.nbytes
    assert "no region 'other' is registered" in told(placed(size, name="other"))
    assert f"k.data = {size - 2} bytes: its shape needs {size}" in told(placed(size - 2))
    assert "k.data = 0 bytes" in told(placed(0))
    assert f"k.shared_memory_offset = 8000: {size} bytes from there" in told(placed(size, 8000))
    assert "k.shared_memory_offset" in told(placed(size, 2**62))
    assert "must be a count of bytes" in told(placed(size, -1))
    os.truncate(region.path, size - 1)
    assert f"the shared memory object has {size - 1} bytes now" in told(placed(size))
    os.truncate(region.path, 8192)
    os.unlink(region.path)
    assert "cannot be opened: No such file" in told(placed(size))
    assert triton.infer("get_sequence", id="a")[0]["lengths"] == [0] * LAYERS


def test_an_output_that_has_no_room_is_told_before_anything_is_changed(
    triton: Triton, region: Region, rng: np.random.Generator
) -> None:
    q, k = rows(rng, 1, QO_HEADS), rows(rng, 1)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    inputs = [triton.input(name, array) for name, array in {"q": q, "k": k, "v": k}.items()]

    def told(*outputs: Any) -> str:
        return refusal(infer, triton, "decode", inputs, outputs, layer=0, sequences=["a"])

    def o(size: int, offset: int = 0) -> Any:
        return to_region(triton, "o", region, size, offset)

    lse = to_region(triton, "lse", region, 16, ROW - 4)
    assert f"o.shared_memory_byte_size = 64: the output has {ROW} bytes" in told(o(64))
    assert "o.shared_memory_byte_size = 0" in told(o(0))
    assert "o.shared_memory_offset = 8000" in told(o(ROW, 8000))
    assert "another output is written there as well" in told(o(ROW), lse)
    with memory(64) as other:
        triton.client.register_system_shared_memory("same", region.key, 8192)
        same = Region("same", region.key, region.handle)
        assert "another output" in told(o(ROW), to_region(triton, "lse", same, 16))
        triton.client.unregister_system_shared_memory("same")
        assert "no region" in told(to_region(triton, "o", other, ROW))
    os.truncate(region.path, 100)
    assert "has 100 bytes now" in told(o(ROW))
    os.truncate(region.path, 8192)
    os.unlink(region.path)
    assert "cannot be opened" in told(o(ROW))
    assert triton.infer("get_sequence", id="a")[0]["lengths"] == [0] * LAYERS


def test_a_gathers_output_that_has_no_room_is_told(
    triton: Triton, region: Region, rng: np.random.Generator
) -> None:
    fill(triton, rng, "a", 3)
    outputs = [to_region(triton, "k", region, 8)]
    told = refusal(infer, triton, "gather", [], outputs, layer=0, sequences=["a"])
    size = 3 * KV_HEADS * HEAD_DIM * WIRE_DTYPE.itemsize
    assert f"k.shared_memory_byte_size = 8: the output has {size}" in told
    assert set(region.all_bytes()) == {7}


def test_an_answer_that_can_no_longer_be_written_says_that_it_took_effect(
    triton: Triton, service: Service, region: Region, rng: np.random.Generator
) -> None:
    """Its object is cut short while the engine is at it: no harm to the door, and no lie."""
    q, k = rows(rng, 1, QO_HEADS), rows(rng, 1)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    inputs = [triton.input(name, array) for name, array in {"q": q, "k": k, "v": k}.items()]
    outputs = [to_region(triton, "o", region, ROW)]
    service.backend.entered.clear()
    service.backend.gate.clear()

    def cut() -> None:
        assert service.backend.entered.wait(20)
        os.truncate(region.path, 10)
        service.backend.gate.set()

    cutting = threading.Thread(target=cut)
    cutting.start()
    told = refusal(infer, triton, "decode", inputs, outputs, layer=0, sequences=["a"])
    cutting.join()
    assert "has 10 bytes now" in told and "the operation has taken effect" in told
    assert os.path.getsize(region.path) == 10, "the door made the object longer"
    assert triton.infer("get_sequence", id="a")[0]["lengths"][0] == 1


def test_clients_that_cut_their_regions_short_all_the_time_do_no_harm(
    triton: Triton, region: Region, rng: np.random.Generator
) -> None:
    k = np.concatenate([rows(rng, 1)] * 4)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    over = threading.Event()

    def cut() -> None:
        while not over.is_set():
            os.truncate(region.path, 0)
            os.truncate(region.path, 8192)

    cutting = threading.Thread(target=cut)
    cutting.start()
    done = 0
    try:
        for _ in range(60):
            try:
                infer(
                    triton,
                    "ragged_prefill",
                    packed_without_writing(triton, region, k),
                    [to_region(triton, "lse", region, 4096, 4096)],
                    qo_indptr=[0, 4],
                    kv_indptr=[0, 4],
                )
                done += 1
            except InferenceServerException as error:
                assert "the shared memory object" in error.message(), error
    finally:
        over.set()
        cutting.join()
    assert triton.infer("pool")[0]["integrity"] == "ok"


def packed_without_writing(triton: Triton, region: Region, k: Any) -> list[Any]:
    return [
        triton.module.InferInput(name, k.shape, np_to_triton_dtype(k.dtype)).set_shared_memory(
            region.name, k.nbytes
        )
        for name in ("q", "k", "v")
    ]


def test_more_than_a_body_may_have_is_not_read_from_regions() -> None:
    with (
        serving("--server.client-shm", "true", "--server.max-body-bytes", "4096") as service,
        grpc_door(service) as door,
    ):
        for triton in (http_client(service), grpc_client(door)):
            with registered(triton, 1 << 16) as region:
                given = packed(triton, region, {"k": np.zeros((16, KV_HEADS, 64), np.float16)})
                told = refusal(infer, triton, "append", given, layer=0, sequences=["a"])
                assert "at most 4096 are read" in told
            triton.client.close()


# requests that no client library makes


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"shared_memory_byte_size": 4}, "o.shared_memory_region = None: must be the name"),
        ({"shared_memory_offset": 4}, "o.shared_memory_region = None"),
        ({"shared_memory_region": 7}, "o.shared_memory_region = 7"),
        ({"shared_memory_region": "mine"}, "o.shared_memory_byte_size = None"),
        (
            {"shared_memory_region": "mine", "shared_memory_byte_size": 4.0},
            "o.shared_memory_byte_size = 4.0",
        ),
        (
            {"shared_memory_region": "mine", "shared_memory_byte_size": True},
            "o.shared_memory_byte_size = True",
        ),
        (
            {
                "shared_memory_region": "mine",
                "shared_memory_byte_size": 4,
                "binary_data_size": 4,
            },
            "leave the data itself out",
        ),
    ],
)
def test_parameters_that_name_no_place_are_refused(
    client: httpx.Client, parameters: dict[str, Any], words: str
) -> None:
    given = {"name": "o", "datatype": "FP32", "shape": [1, 1, 1, 1], "parameters": parameters}
    response = client.post("/v2/models/merge/infer", json={"inputs": [given]})
    assert response.status_code == 422 and words in response.json()["error"], response.text


def test_nothing_stays_open_or_taken_however_a_call_ends(
    service: Service, grpc: Server, triton: Triton, rng: np.random.Generator
) -> None:
    """Also of tensors that a thread copies."""
    q = rows(rng, 400, QO_HEADS)
    with registered(triton, 2 * q.nbytes) as region:
        before = open_files(region)
        for name, given in (("q", {"kv_indptr": [0, 1]}), ("q", {}), ("other", {})):
            inputs = [in_region(triton, "q", q, region), *in_body(triton, rows(rng, 1))]
            outputs = [to_region(triton, "o", region, q.nbytes, q.nbytes)]
            if name == "other":
                inputs[0].set_shared_memory(name, q.nbytes)
            fields = {"qo_indptr": [0, 400], **given}
            if name == "q" and "kv_indptr" in fields:
                infer(triton, "ragged_prefill", inputs, outputs, **fields)
            else:
                refusal(infer, triton, "ragged_prefill", inputs, outputs, **fields)
        wait_for(lambda: open_files(region) == before, "all objects to be closed")
        for door in (service.door, grpc.door):
            wait_for(lambda door=door: is_free(door), "all slots to be free")


def in_body(triton: Triton, k: Any) -> list[Any]:
    return [triton.input("k", k), triton.input("v", k)]


def open_files(region: Region) -> int:
    """How often this process has the object open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{fd}") == region.path
    return found


def is_free(door: Any) -> bool:
    caller = door.link.caller
    caller.loop.call_soon_threadsafe(door.link.spare.free)
    return bool(caller.slots.free() == caller.mapping.size)
