"""Regions of shared memory over both doors: what may be registered, and whose it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from http_service import Service, serving
from regions import (
    free_key,
    infer,
    memory,
    refusal,
    registered,
    status,
    to_region,
)
from test_http_keys import write_keys
from triton_callers import Triton, grpc_client, grpc_door, http_client


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--server.client-shm", "true", "--server.client-shm-regions", "8") as running:
        yield running


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
