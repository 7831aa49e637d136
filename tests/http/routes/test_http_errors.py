"""Errors over a real socket, one of each kind: status, code, and the numbers they promise."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    JSON,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    append,
    check_problem,
    create,
    post,
    rows,
)
from http_service import Service, serving

ANY = np.random.default_rng(3)
Q1 = rows(ANY, 1, QO_HEADS)
KV1 = rows(ANY, 1)
KV2 = rows(ANY, 2)
A = {"layer": 0, "sequences": ["a"]}


def shape(*sizes: int) -> Any:
    return np.zeros(sizes, WIRE_DTYPE)


def test_unknown_sequences_are_named(client: httpx.Client) -> None:
    create(client, "a")
    fields = {"layer": 0, "sequences": ["x", "a", "y"]}
    response = post(client, "/v1/decode", fields, {"q": rows(ANY, 3, QO_HEADS)})
    check_problem(response, 404, "unknown_sequence", sequences=["x", "y"])
    kv = rows(ANY, 3)
    response = post(client, "/v1/append", fields, {"k": kv, "v": kv})
    check_problem(response, 404, "unknown_sequence", sequences=["x", "y"])
    for response in (
        client.get("/v1/sequences/x"),
        client.delete("/v1/sequences/x"),
        client.post("/v1/sequences/x/truncate", json={"length": 0}),
        client.post("/v1/sequences", json={"sequences": [{"parent": "x"}]}),
        client.post("/v1/page-table", json={"sequences": ["a", "x"]}),
        post(client, "/v1/gather", {"layer": 0, "sequences": ["x"]}),
    ):
        check_problem(response, 404, "unknown_sequence", sequences=["x"])


@pytest.fixture(scope="module")
def small() -> Any:
    with serving("--server.max-body-bytes", "4096") as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/merge", "/v1/sequences"])
def test_a_body_that_grows_too_large_on_its_way_is_refused(small: Service, path: str) -> None:
    def chunks() -> Any:
        for _ in range(40):
            yield b"{" * 1024

    with small.client() as client:
        response = client.post(path, content=chunks(), headers={"content-type": JSON})
        check_problem(response, 413, "body_too_large", limit=4096)
        assert client.get("/health/live").status_code == 200, "the connection is still good"


def test_a_body_as_large_as_the_limit_is_read(small: Service) -> None:
    with small.client() as client:
        for size, status in ((4096, 400), (4097, 413)):
            headers = {"content-type": SAFETENSORS}
            response = client.post("/v1/merge", content=bytes(size), headers=headers)
            assert response.status_code == status, size


def test_parameters_of_the_media_type_and_its_case_do_not_matter(client: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = client.post("/v1/sequences", content=b'{"sequences": [{}]}', headers=headers)
    assert response.status_code == 201


# tests/operations has a row for every rule; here is one of each kind, end to end:
# (path, fields, tensors, field named).

BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("append", {"sequences": ["a"]}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "sequences": ["a b"]}, {"k": KV1, "v": KV1}, "sequences.0"),
    ("append", {**A, "append_indptr": [0, -1]}, {"k": KV1, "v": KV1}, "append_indptr.1"),
    ("append", {**A, "causal": True}, {"k": KV1, "v": KV1}, "causal"),
    ("append", A, {"k": KV1}, "tensors.v"),
    ("append", A, {"k": KV1.astype(np.uint8), "v": KV1}, "k.dtype"),
    ("decode", A, {"q": shape(1, 3, HEAD_DIM)}, "q.shape"),
    ("decode", {**A, "sm_scale": 1e300}, {"q": Q1}, "sm_scale"),
    ("prefill", {**A, "qo_indptr": [0, 0]}, {"q": Q1}, "qo_indptr"),
    ("cascade", {"layer": 0, "levels": [{"sequences": ["a"]}]}, {"q": Q1}, "levels.0.qo_indptr"),
    ("merge", {}, {"o": Q1}, "tensors.lse"),
    ("gather", {**A, "dtype": "fp8_e4m3"}, {}, "dtype"),
]


@pytest.mark.parametrize(
    "case", BAD, ids=[f"{i}-{case[0]}-{case[3]}" for i, case in enumerate(BAD)]
)
def test_a_request_that_breaks_a_rule_is_named_in_the_error(
    client: httpx.Client, case: tuple[str, dict[str, Any], dict[str, Any], str], media: str
) -> None:
    path, fields, tensors, field = case
    create(client, "a")
    before = client.get("/v1/pool").json()
    response = post(client, f"/v1/{path}", fields, tensors, media)
    problem = check_problem(response, 422, "invalid_request", field=field)
    assert problem["rule"] and "value" in problem
    assert client.get("/v1/pool").json() == before
    assert client.get("/v1/sequences/a").json()["lengths"] == [0, 0]


def test_a_bug_is_reported_as_internal_without_its_inside(
    service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, media: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a secret")

    create(client, "a")
    append(client, 0, "a", KV2, KV2)
    before = client.get("/v1/pool").json()
    for name in ("attend", "append", "gather"):
        monkeypatch.setattr(service.backend, name, broken, raising=False)
    for path, tensors in (("gather", {}), ("append", {"k": KV1, "v": KV1}), ("decode", {"q": Q1})):
        response = post(client, f"/v1/{path}", A, tensors, media)
        check_problem(response, 500, "internal")
        assert "secret" not in response.text
    monkeypatch.undo()
    assert client.get("/v1/pool").json() == before
    assert post(client, "/v1/decode", A, {"q": Q1}, media).status_code == 200
