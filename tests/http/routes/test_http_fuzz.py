"""Mutated requests over a real socket: clean refusals only, no state changed, memory bounded."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    JSON,
    QO_HEADS,
    SAFETENSORS,
    append,
    check_problem,
    create,
    rows,
    write_body,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.long

RNG = np.random.default_rng(11)
KV, Q = rows(RNG, 1), rows(RNG, 1, QO_HEADS)
LSE = np.zeros((1, QO_HEADS), np.float32)
ONE = {"layer": 0, "sequences": ["a"]}
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "append": ({**ONE, "append_indptr": [0, 1], "offsets": [2]}, {"k": KV, "v": KV}),
    "decode": ({**ONE, "cascade": "always"}, {"q": Q, "k": KV, "v": KV}),
    "prefill": ({**ONE, "qo_indptr": [0, 1]}, {"q": Q, "mask": np.ones(2, bool)}),
    "ragged-prefill": (
        {"qo_indptr": [0, 1], "kv_indptr": [0, 1], "sm_scale": 0.5},
        {"q": Q, "k": KV, "v": KV},
    ),
    "cascade": ({"layer": 0, "levels": [{"sequences": ["a"], "qo_indptr": [0, 1]}]}, {"q": Q}),
    "merge": ({"indptr": [0, 1]}, {"o": Q, "lse": LSE}),
    "gather": (ONE, {}),
}
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2, 2**31, 2**63, 2**64, 1e308, 0.5, "", "a", "b", [], [0], [0, 1], {}]
)


@pytest.fixture(params=list(GOOD))
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def state(client: httpx.Client) -> Any:
    return client.get("/v1/pool").json(), client.get("/v1/sequences").json()


def check_refused_or_true(client: httpx.Client, route: str, body: bytes, media: str) -> None:
    """A 4xx problem that changed nothing, or a 200 (a mutation may well be legal)."""
    before = state(client)
    headers = {"content-type": media}
    tracemalloc.start()
    response = client.post(f"/v1/{route}", content=body, headers=headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24, f"{peak} bytes for a body of {len(body)}"
    if response.status_code == 200:
        if route in ("append", "decode"):
            client.post("/v1/sequences/a/truncate", json={"length": 0})
            append(client, 0, "a", rows(RNG, 2), rows(RNG, 2))
        return
    assert 400 <= response.status_code < 500, response.text
    check_problem(response, response.status_code, response.json()["code"])
    assert state(client) == before, response.text


def prepare(client: httpx.Client) -> None:
    if client.get("/v1/sequences/a").status_code == 404:
        create(client, "a")
        append(client, 0, "a", rows(RNG, 2), rows(RNG, 2))


@given(data=st.data())
@FUZZ
def test_bodies_with_bytes_changed(client: httpx.Client, route: str, data: st.DataObject) -> None:
    prepare(client)
    good = write_body(SAFETENSORS, *GOOD[route])
    (length,) = struct.unpack("<Q", good[:8])
    body = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 8 + length - 1))
        match data.draw(st.sampled_from(("set", "cut", "insert", "end"))):
            case "set":
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                del body[-data.draw(st.integers(1, 8)) :]
        if len(body) < 8 + length:
            break
    check_refused_or_true(client, route, bytes(body), SAFETENSORS)


@given(data=st.data())
@FUZZ
def test_headers_with_values_changed(client: httpx.Client, route: str, data: st.DataObject) -> None:
    prepare(client)
    good = write_body(SAFETENSORS, *GOOD[route])
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    if names:
        entry = header[data.draw(st.sampled_from(names))]
        match data.draw(st.sampled_from(("dtype", "shape", "data_offsets", "size", "copy"))):
            case "dtype":
                dtypes = st.sampled_from(["F16", "F32", "BF16", "F64", "U8", "BOOL", "I32", "Z9"])
                entry["dtype"] = data.draw(dtypes)
            case "copy":
                header["again"] = entry
            case "size" if entry["shape"]:
                at = data.draw(st.integers(0, len(entry["shape"]) - 1))
                entry["shape"][at] = data.draw(ODD)
            case "shape":
                entry["shape"] = data.draw(st.lists(st.integers(0, 3) | ODD, max_size=5))
            case _:
                entry["data_offsets"] = data.draw(st.lists(st.integers(0, 999) | ODD, max_size=3))
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + good[8 + length :]
    check_refused_or_true(client, route, body, SAFETENSORS)


@given(data=st.data())
@FUZZ
def test_fields_with_values_changed(client: httpx.Client, route: str, data: st.DataObject) -> None:
    prepare(client)
    fields, tensors = GOOD[route]
    fields = dict(fields)
    names = [*fields, "window_left", "causal", "lse_base", "logits_soft_cap", "unknown"]
    for _ in range(data.draw(st.integers(1, 2))):
        fields[data.draw(st.sampled_from(names))] = data.draw(ODD)
    media = data.draw(st.sampled_from([SAFETENSORS, JSON]))
    check_refused_or_true(client, route, write_body(media, fields, tensors), media)
