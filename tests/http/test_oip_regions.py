"""tritonclient, unmodified, over both doors: tensors in system shared memory, with true numbers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import oracle
import pytest
from http_messages import HEAD_DIM, KV_HEADS, LAYERS, QO_HEADS, WIRE_DTYPE, rows
from http_service import Service, serving
from regions import Region, free_key, in_region, memory, packed, registered, to_region
from test_http_keys import write_keys
from test_http_numbers import SCALE, check, seen
from test_oip_numbers import fill
from triton_callers import Triton, grpc_client, grpc_door, http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ROW = QO_HEADS * HEAD_DIM * WIRE_DTYPE.itemsize
"""Bytes of one row of q, or o."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--server.client-shm", "true", "--server.client-shm-regions", "8") as running:
        yield running


def refusal(call: Any, *given: Any, **how: Any) -> str:
    """What tritonclient says of a refusal: status and message."""
    with pytest.raises(InferenceServerException) as told:
        call(*given, **how)
    return f"{str(told.value.status()).removeprefix('StatusCode.')} {told.value.message()}"


def infer(triton: Triton, model: str, inputs: Any, outputs: Any = None, **fields: Any) -> Any:
    parameters = {
        name: json.dumps(value) if isinstance(value, (list, dict)) else value
        for name, value in fields.items()
    }
    return triton.client.infer(model, inputs, outputs=outputs, parameters=parameters)


def told_of(result: Any, name: str) -> dict[str, Any]:
    """An output's parameters, as the answer has them."""
    output = result.get_output(name)
    if isinstance(output, dict):
        return dict(output["parameters"])
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in output.parameters.items()
    }


def status(triton: Triton, name: str = "") -> dict[str, tuple[str, int, int]]:
    """The regions that are registered: key, offset and size by name."""
    told = triton.client.get_system_shared_memory_status(name)
    if isinstance(told, list):
        return {one["name"]: (one["key"], one["offset"], one["byte_size"]) for one in told}
    return {name: (one.key, one.offset, one.byte_size) for name, one in told.regions.items()}


# numbers


def test_append_and_decode_read_and_write_regions(triton: Triton, rng: np.random.Generator) -> None:
    k, v, q = rows(rng, 5), rows(rng, 5), rows(rng, 1, QO_HEADS)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    with registered(triton, 1 << 14) as given, registered(triton, 1 << 14) as wanted:
        indptr = np.array([0, 5], np.int32)
        inputs = packed(triton, given, {"k": k, "v": v, "append_indptr": indptr})
        result = infer(triton, "append", inputs, layer=0, sequences=["a"])
        assert "[5]" in str(result.get_response())
        outputs = [to_region(triton, "o", wanted, 4096, 64), to_region(triton, "lse", wanted, 16)]
        inputs = [in_region(triton, "q", q, given, 128)]
        result = infer(triton, "decode", inputs, outputs, layer=0, sequences=["a"])
        sizes = {"shared_memory_region": wanted.name, "shared_memory_byte_size": ROW}
        assert told_of(result, "o") == {**sizes, "shared_memory_offset": 64}
        tensors = {
            "o": wanted.get(q.shape, q.dtype, 64),
            "lse": wanted.get(q.shape[:2], np.float32),
        }
        check(tensors, *oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE), "decode")
        assert set(wanted.all_bytes()[64 + ROW :]) == {7}, "more was written than the output"


def test_prefill_with_a_mask_takes_some_inputs_from_regions_and_some_from_the_body(
    triton: Triton, rng: np.random.Generator
) -> None:
    k, v = fill(triton, rng, "a", 6)
    q = rows(rng, 3, QO_HEADS)
    mask = rng.random((3, 6)) < 0.6
    with registered(triton, 1 << 14) as region:
        inputs = [
            in_region(triton, "mask", mask.reshape(-1), region, 8000),
            triton.input("q", q),
            in_region(triton, "qo_indptr", np.array([0, 3], np.int32), region),
        ]
        outputs = [
            to_region(triton, "o", region, 3 * ROW),
            triton.module.InferRequestedOutput("lse"),
        ]
        result = infer(triton, "prefill", inputs, outputs, layer=1, sequences=["a"], causal=True)
        tensors = {"o": region.get(q.shape, q.dtype), "lse": result.as_numpy("lse")}
    visible = seen(q, k, causal=True, mask=mask)
    check(tensors, *oracle.attend(q, k, v, visible, sm_scale=SCALE), "a masked prefill")


def test_large_tensors_and_long_json_go_the_same_way(
    triton: Triton, rng: np.random.Generator
) -> None:
    """Beyond what the event loop copies itself, and what a door reads of JSON itself."""
    k, v = fill(triton, rng, "root", 8)
    names = [f"{'x' * 60}-{i}" for i in range(400)]
    forks = [{"id": name, "parent": "root"} for name in names]
    triton.infer("create_sequences", sequences=forks)
    q = rows(rng, 400, QO_HEADS)
    with registered(triton, 1 << 20) as given, registered(triton, 1 << 20) as wanted:
        inputs = packed(triton, given, {"qo_indptr": np.arange(401, dtype=np.int32), "q": q})
        outputs = [
            to_region(triton, "o", wanted, 400 * ROW),
            to_region(triton, "lse", wanted, 4 * 400 * QO_HEADS, 400 * ROW),
        ]
        infer(triton, "prefill", inputs, outputs, layer=1, sequences=names)
        tensors = {
            "o": wanted.get(q.shape, q.dtype),
            "lse": wanted.get(q.shape[:2], np.float32, 400 * ROW),
        }
    check(tensors, *oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE), "forks")


def test_a_region_may_begin_inside_its_object(triton: Triton, rng: np.random.Generator) -> None:
    k = rows(rng, 2)
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    with memory(8192) as region:
        triton.client.register_system_shared_memory("inside", region.key, 4096, offset=1024)
        assert status(triton, "inside") == {"inside": (region.key, 1024, 4096)}
        region.put(k, offset=1024 + 256)
        inside = Region("inside", region.key, region.handle)
        given = [
            triton.module.InferInput(name, k.shape, np_to_triton_dtype(k.dtype)).set_shared_memory(
                "inside", k.nbytes, offset=256
            )
            for name in ("k", "v")
        ]
        infer(triton, "append", given, layer=0, sequences=["a"], append_indptr=[0, 2])
        outputs = [to_region(triton, "v", inside, k.nbytes, 512)]
        infer(triton, "gather", [], outputs, layer=0, sequences=["a"])
        np.testing.assert_array_equal(region.get(k.shape, k.dtype, 1024 + 512), k)
        triton.client.unregister_system_shared_memory("inside")


# registration


def test_regions_are_known_at_both_doors(over_http: Triton, over_grpc: Triton) -> None:
    assert status(over_http) == status(over_grpc) == {}
    for one, other in ((over_http, over_grpc), (over_grpc, over_http)):
        with registered(one, 64) as region:
            wanted = {region.name: (region.key, 0, 64)}
            assert status(other) == status(other, region.name) == wanted
            assert "is registered already" in refusal(
                other.client.register_system_shared_memory, region.name, region.key, 64
            )
        assert status(other) == {}
    with memory(64) as region:
        for name in ("x", "y"):
            over_http.client.register_system_shared_memory(name, region.key, 64)
        over_grpc.client.unregister_system_shared_memory()
        assert status(over_http) == {}


@pytest.mark.parametrize(
    ("key", "size", "offset", "words"),
    [
        ("", 64, 0, "key = : must name an object in /dev/shm"),
        ("/", 64, 0, "must name an object"),
        ("..", 64, 0, "must name an object"),
        ("/../etc/passwd", 64, 0, "must name an object"),
        ("/x\0y", 64, 0, "must name an object"),
        ("/" + "x" * 300, 64, 0, "must name an object"),
        (None, 0, 0, "byte_size = 0: must be at least 1"),
        (None, 65, 0, "has 64 bytes now, 65 are needed"),
        (None, 1, 64, "has 64 bytes now, 65 are needed"),
        (None, 2**62, 2**62, "bytes now, 9223372036854775808 are needed"),
        (None, 2**63, 0, "byte_size = 9223372036854775808"),
        (None, 64, 2**63, "offset = 9223372036854775808"),
        ("/attnd-test-nobody-made-it", 64, 0, "cannot be opened: No such file"),
    ],
)
def test_what_cannot_be_a_region_is_refused(
    triton: Triton, key: str | None, size: int, offset: int, words: str
) -> None:
    with memory(64) as region:
        given = region.key if key is None else key
        told = refusal(
            triton.client.register_system_shared_memory, "mine", given, size, offset=offset
        )
    assert told.startswith(("422 invalid_request", "INVALID_ARGUMENT invalid_request")), told
    assert words in told
    assert status(triton) == {}


def test_only_plain_objects_of_permitted_users_are_opened(triton: Triton) -> None:
    register = triton.client.register_system_shared_memory
    with memory(64) as region:
        for make, words in (
            (lambda path: os.symlink(region.path, path), "cannot be opened: Too many levels"),
            (lambda path: os.symlink("/etc/passwd", path), "cannot be opened: Too many levels"),
            (lambda path: os.link(region.path, path), "is no plain object"),
            (os.mkfifo, "is no plain object"),
            (os.mkdir, "cannot be opened: Is a directory"),
        ):
            key = free_key()
            make(f"/dev/shm{key}")
            try:
                assert words in refusal(register, "mine", key, 8)
            finally:
                (os.rmdir if make is os.mkdir else os.unlink)(f"/dev/shm{key}")
        if os.geteuid() == 0:
            os.chown(region.path, 12345, -1)
            assert "belongs to another user" in refusal(register, "mine", region.key, 8)
            os.chown(region.path, 0, -1)
    assert status(triton) == {}


def test_there_is_an_end_to_how_many_regions_a_namespace_has(triton: Triton) -> None:
    client = triton.client
    with memory(64) as region:
        for i in range(8):
            client.register_system_shared_memory(f"r{i}", region.key, 64)
        told = refusal(client.register_system_shared_memory, "r8", region.key, 64)
        assert "8 are registered: unregister some, or raise server.client_shm_regions" in told
        client.unregister_system_shared_memory("r3")
        client.register_system_shared_memory("r8", region.key, 64)
        client.unregister_system_shared_memory()
        assert status(triton) == {}
        client.unregister_system_shared_memory()


def test_a_region_that_nobody_registered_is_not_found(triton: Triton) -> None:
    client = triton.client
    for call in (client.get_system_shared_memory_status, client.unregister_system_shared_memory):
        told = refusal(call, "nobodys")
        assert told.startswith(("404 not_found", "NOT_FOUND not_found")), told
        assert "no region 'nobodys' is registered" in told
    assert "characters, no slash" in refusal(
        client.register_system_shared_memory, "x" * 129, "/x", 64
    )


# refused requests


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


# whose they are


def test_regions_of_a_namespace_are_its_own(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    write_keys(path)
    given = ("--server.client-shm", "true", "--auth.keys-file", str(path))
    red, blue = (
        {"headers": {"authorization": f"Bearer a-key-of-{one}"}} for one in ("red", "blue")
    )
    with serving(*given) as service, grpc_door(service) as door:
        for triton in (http_client(service), grpc_client(door)):
            client = triton.client
            with registered(triton, 64, "red:", **red) as region:
                assert client.get_system_shared_memory_status(region.name, **red)
                told = refusal(client.get_system_shared_memory_status, region.name, **blue)
                assert "no region" in told
                client.unregister_system_shared_memory(**blue)
                assert client.get_system_shared_memory_status(region.name, **red)
                register = client.register_system_shared_memory
                told = refusal(register, "mine", region.key, 64, **blue)
                assert "must begin with blue:" in told
                assert "unauthorized" in refusal(register, "mine", region.key, 64)
                inputs = [
                    triton.module.InferInput("q", [1], "FP32").set_shared_memory(region.name, 4)
                ]
                assert "no region" in refusal(client.infer, "decode", inputs, **blue)
            with memory(64) as open_to_all:
                assert "must begin with red:" in refusal(register, "x", open_to_all.key, 64, **red)
            client.close()


def test_where_it_is_switched_off_every_way_in_says_so(rng: np.random.Generator) -> None:
    with serving() as service, grpc_door(service) as door, memory(64) as region:
        for triton in (http_client(service), grpc_client(door)):
            client = triton.client
            assert "system_shared_memory" not in str(client.get_server_metadata())
            one = triton.module.InferInput("o", [1, 1, 1, 1], "FP32")
            one.set_shared_memory(region.name, 4)
            output = to_region(triton, "o", region, 4)
            o, lse = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
            inputs = [triton.input("o", o), triton.input("lse", lse)]
            for call, given in (
                (client.get_system_shared_memory_status, ()),
                (client.unregister_system_shared_memory, ()),
                (client.register_system_shared_memory, ("mine", region.key, 64)),
                (client.infer, ("merge", [one, inputs[1]])),
                (infer, (triton, "merge", inputs, [output])),
            ):
                told = refusal(call, *given)
                assert told.startswith(("501 not_supported", "UNIMPLEMENTED not_supported")), told
                assert "set server.client_shm" in told
            client.close()


def test_device_regions_are_refused_and_there_are_none(triton: Triton) -> None:
    client = triton.client
    assert "system_shared_memory" in str(client.get_server_metadata())
    told = refusal(client.register_cuda_shared_memory, "mine", b"x" * 64, 0, 64)
    assert told.startswith(("501 not_supported", "UNIMPLEMENTED not_supported")), told
    assert "regions in device memory are not served" in told
    assert not getattr(client.get_cuda_shared_memory_status(), "regions", None)
    client.unregister_cuda_shared_memory()
    assert "no region 'mine'" in refusal(client.unregister_cuda_shared_memory, "mine")


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


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "the request is not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'{"byte_size": 4}', 422, "key = None"),
        (b'{"key": "/x"}', 422, "byte_size = None"),
        (b'{"key": "/x", "byte_size": "4"}', 422, "byte_size = 4"),
        (b'{"key": "/x", "byte_size": 4, "offset": -1}', 422, "offset = -1"),
        (b'{"key": "/x", "byte_size": 4, "more": 1}', 422, "is not known here"),
        (b"x" * 20000, 413, "at most 16384"),
    ],
)
def test_a_registration_that_is_none_is_refused(
    client: httpx.Client, body: bytes, status: int, words: str
) -> None:
    response = client.post("/v2/systemsharedmemory/region/mine/register", content=body)
    assert response.status_code == status and words in response.json()["error"], response.text
