"""Bodies as clients write and read them, without the service's own code; and plain requests."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import oracle
import safetensors.numpy

from kernels.backend import NUMPY_DTYPES

KIND: Final = os.environ.get("TEST_BACKEND", "cpu")
POOL_DTYPE: Final = "fp32" if KIND == "cpu" else "fp16"
WIRE_DTYPE: Final = np.dtype(NUMPY_DTYPES[POOL_DTYPE])
O_TOLERANCE: Final = {"fp32": 1e-5, "fp16": 1e-3}[POOL_DTYPE]
LSE_TOLERANCE: Final = 1e-3
LAYERS, KV_HEADS, QO_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 2, 4, 64, 4, 64
SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
SPELLED: Final = {"Infinity": np.inf, "-Infinity": -np.inf, "NaN": np.nan}
DTYPES: Final = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "F64": np.dtype(np.float64),
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def write_body(media: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> bytes:
    if media == SAFETENSORS:
        dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        return bytes(safetensors.numpy.save(dense, {"request": json.dumps(fields)}))
    spelled = {name: spell(array) for name, array in tensors.items()}
    return json.dumps({**fields, "tensors": spelled}).encode()


def spell(array: Any) -> dict[str, Any]:
    flat = array.reshape(-1)
    data = flat.tolist()
    if array.dtype.kind not in "bui":
        names = {np.inf: "Infinity", -np.inf: "-Infinity"}
        data = [names.get(value, value) for value in flat.astype(np.float64).tolist()]
    return {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data": data}


def read_body(response: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of an answer in either media type."""
    if response.headers["content-type"] == SAFETENSORS:
        (length,) = struct.unpack("<Q", response.content[:8])
        header = json.loads(response.content[8 : 8 + length])
        return json.loads(header["__metadata__"]["response"]), dict(
            safetensors.numpy.load(response.content)
        )
    fields = response.json()
    return fields, {name: unspell(one) for name, one in fields.pop("tensors", {}).items()}


def unspell(one: dict[str, Any]) -> Any:
    data = [SPELLED[value] if isinstance(value, str) else value for value in one["data"]]
    return np.array(data, np.float64).astype(DTYPES[one["dtype"]]).reshape(one["shape"])


def post(
    client: httpx.Client,
    path: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    media: str = SAFETENSORS,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    body = write_body(media, fields, tensors or {})
    return client.post(path, content=body, headers={"content-type": media, **(headers or {})})


def ask(
    client: httpx.Client,
    path: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    media: str = SAFETENSORS,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of an answer that must be 200."""
    response = post(client, path, fields, tensors, media)
    assert response.status_code == 200, response.text
    return read_body(response)


def create(client: httpx.Client, *sequences: Mapping[str, Any] | str) -> list[dict[str, Any]]:
    new = [{"id": one} if isinstance(one, str) else dict(one) for one in sequences]
    response = client.post("/v1/sequences", json={"sequences": new})
    assert response.status_code == 201, response.text
    made: list[dict[str, Any]] = response.json()["sequences"]
    return made


def rows(rng: np.random.Generator, n: int, heads: int = KV_HEADS) -> Any:
    """Unit-normal `[n, heads, HEAD_DIM]` in the wire's dtype."""
    return rng.standard_normal((n, heads, HEAD_DIM)).astype(WIRE_DTYPE)


def append(client: httpx.Client, layer: int, name: str, k: Any, v: Any) -> dict[str, Any]:
    fields = {"layer": layer, "sequences": [name], "append_indptr": [0, len(k)]}
    return ask(client, "/v1/append", fields, {"k": k, "v": v})[0]


def fill(
    client: httpx.Client, rng: np.random.Generator, name: str, n: int, layer: int = 0
) -> tuple[Any, Any]:
    """A new sequence with n tokens at every layer; its k and v at `layer`."""
    create(client, name)
    held = [(rows(rng, n), rows(rng, n)) for _ in range(LAYERS)]
    for each, (k, v) in enumerate(held):
        append(client, each, name, k, v)
    return held[layer]


def store(client: httpx.Client, ids: list[int]) -> None:
    """Cache pages of these token ids."""
    fill(client, np.random.default_rng(0), "a", len(ids))
    assert client.post("/v1/sequences/a/commit", json={"token_ids": ids}).is_success
    assert client.delete("/v1/sequences/a").is_success


@contextmanager
def streaming(client: httpx.Client, path: str, **how: Any) -> Iterator[Iterator[dict[str, str]]]:
    """The events of a stream, each by the names of its fields."""
    with client.stream("GET", path, **how) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        yield read_events(response.iter_lines())


def read_events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        else:
            if "data" in found:
                yield found
            found = {}


def endless_prefill(n: int = 300_000) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ragged prefill of n rows over n keys, of 6n bytes: minutes of work in a small body."""
    small = np.zeros((n, 1, 1), np.float16)
    fields = {"qo_indptr": [0, n], "kv_indptr": [0, n]}
    return fields, {"q": small, "k": small, "v": small}


def check_problem(response: httpx.Response, status: int, code: str, **numbers: Any) -> Any:
    """The response is this error, as problem+json, with these numbers in it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == code, problem
    assert problem["status"] == status, problem
    assert problem["type"] and problem["title"] and problem["detail"], problem
    assert {name: problem.get(name) for name in numbers} == numbers, problem
    check_common_headers(response)
    return problem


def check_common_headers(response: httpx.Response) -> None:
    assert response.headers["x-request-id"]
    stages = [entry.split(";")[0].strip() for entry in response.headers["server-timing"].split(",")]
    assert stages == ["queue", "plan", "copy-in", "kernel", "copy-out", "encode"]


SCALE = HEAD_DIM**-0.5


def check(
    answer: dict[str, Any], o: Any, lse: Any, what: str, names: tuple[str, str] = ("o", "lse")
) -> None:
    """A state is within the accuracy bar of `o`, `lse`; rows that see nothing are exact."""
    found_o, found_lse = answer[names[0]], answer[names[1]]
    assert found_o.dtype == WIRE_DTYPE and found_lse.dtype == np.float32, what
    assert found_o.shape == o.shape and found_lse.shape == lse.shape, what
    empty = np.isneginf(lse)
    np.testing.assert_array_equal(np.isneginf(found_lse), empty, what)
    np.testing.assert_array_equal(found_o[empty], 0, what)
    np.testing.assert_allclose(
        found_lse[~empty], lse[~empty], atol=LSE_TOLERANCE, rtol=0, err_msg=what
    )
    np.testing.assert_allclose(
        found_o.astype(np.float64), o, atol=2 * O_TOLERANCE, rtol=2 * O_TOLERANCE, err_msg=what
    )


def seen(q: Any, k: Any, **rules: Any) -> Any:
    return oracle.visible(len(q), len(k), **rules)
