"""Every error of the contract, over a real socket: status, code, and the numbers it promises."""

from __future__ import annotations

import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    JSON,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    PAGES,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    append,
    check_problem,
    create,
    post,
    rows,
    write_body,
)
from http_service import Service, serving

ROUTES = ("append", "decode", "prefill", "ragged-prefill", "cascade", "merge", "gather")
ANY = np.random.default_rng(3)
Q1 = rows(ANY, 1, QO_HEADS)
KV1 = rows(ANY, 1)
KV2 = rows(ANY, 2)
A = {"layer": 0, "sequences": ["a"]}


def shape(*sizes: int) -> Any:
    return np.zeros(sizes, WIRE_DTYPE)


# 400, 404, 405, 413, 415


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"", b"1234567", b"\xff" * 64, b"{}"])
def test_a_body_that_is_not_safetensors_is_malformed(
    client: httpx.Client, route: str, body: bytes
) -> None:
    response = client.post(f"/v1/{route}", content=body, headers={"content-type": SAFETENSORS})
    check_problem(response, 400, "malformed_body")


@pytest.mark.parametrize("route", [*ROUTES, "sequences", "page-table", "sequences/a/truncate"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'{"a": 1, "a": 2}', b'{"a": NaN}', b'"\xff"', b"[" * 100_000],
    ids=["empty", "cut", "list", "duplicate key", "NaN", "not UTF-8", "deep"],
)
def test_a_body_that_is_not_a_json_object_is_refused(
    client: httpx.Client, route: str, body: bytes
) -> None:
    response = client.post(f"/v1/{route}", content=body, headers={"content-type": JSON})
    check_problem(response, 400, "malformed_body")


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


def test_no_such_route(client: httpx.Client) -> None:
    for path in ("/v1", "/index.html", "/v1/sequences/", "/v1/sequences/a/b", "/v2/decode"):
        check_problem(client.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/decode", ["POST"]),
        ("PUT", "/v1/info", ["GET", "HEAD"]),
        ("PATCH", "/v1/sequences", ["GET", "HEAD", "POST"]),
        ("POST", "/v1/sequences/a", ["DELETE", "GET", "HEAD"]),
        ("POST", "/health/live", ["GET", "HEAD"]),
    ],
)
def test_other_methods_are_reported_all_there_are(
    client: httpx.Client, method: str, path: str, allow: list[str]
) -> None:
    response = client.request(method, path)
    check_problem(response, 405, "method_not_allowed", allow=allow)
    assert response.headers["allow"] == ", ".join(allow)


@pytest.fixture(scope="module")
def small() -> Any:
    with serving("--server.max-body-bytes", "4096") as running:
        yield running


@pytest.mark.parametrize("content_type", [SAFETENSORS, JSON])
def test_a_body_declared_too_large_is_refused_before_it_is_sent(
    small: Service, content_type: str
) -> None:
    with small.connect() as peer:
        head = f"POST /v1/merge HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        peer.sendall(f"{head}content-length: 1000000000\r\n\r\n".encode())
        answer = peer.recv(65536)  # not one byte of the body was sent
    assert answer.startswith(b"HTTP/1.1 413"), answer
    problem = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (problem["code"], problem["size"], problem["limit"]) == (
        "body_too_large",
        1000000000,
        4096,
    )


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


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-safetensors", "json"])
@pytest.mark.parametrize("route", [*ROUTES, "sequences", "page-table", "sequences/a/truncate"])
def test_other_media_types_are_refused(client: httpx.Client, route: str, content_type: str) -> None:
    response = client.post(f"/v1/{route}", content=b"{}", headers={"content-type": content_type})
    problem = check_problem(response, 415, "unsupported_media_type")
    wanted = [SAFETENSORS, JSON] if route in (*ROUTES, "sequences") else [JSON]
    assert problem["supported"] == wanted


def test_parameters_of_the_media_type_and_its_case_do_not_matter(client: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = client.post("/v1/sequences", content=b'{"sequences": [{}]}', headers=headers)
    assert response.status_code == 201


def test_encoded_bodies_are_refused(client: httpx.Client) -> None:
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    response = client.post("/v1/sequences", content=b"{}", headers=headers)
    check_problem(response, 415, "unsupported_media_type")


# 409


def test_existing_sequences_are_named_and_nothing_is_made(client: httpx.Client) -> None:
    create(client, "a")
    new = {"sequences": [{"id": "b"}, {"id": "a"}]}
    response = client.post("/v1/sequences", json=new)
    check_problem(response, 409, "sequence_exists", sequences=["a"])
    assert client.get("/v1/sequences/b").status_code == 404


def test_wrong_offsets_are_answered_with_the_true_lengths(client: httpx.Client, media: str) -> None:
    create(client, "a", "b")
    append(client, 0, "a", KV2, KV2)
    kv = {"k": rows(ANY, 2), "v": rows(ANY, 2)}
    q = {"q": rows(ANY, 2, QO_HEADS)}
    fields = {"layer": 0, "sequences": ["b", "a"], "offsets": [0, 1]}
    for path, tensors, more in (
        ("/v1/append", kv, {}),
        ("/v1/decode", q | kv, {}),
        ("/v1/prefill", q | kv, {"qo_indptr": [0, 1, 2]}),
    ):
        response = post(client, path, fields | more, tensors, media)
        check_problem(response, 409, "length_mismatch", lengths={"a": 2, "b": 0})
    lengths = [client.get(f"/v1/sequences/{name}").json()["lengths"][0] for name in "ab"]
    assert lengths == [2, 0]


# 422: (path, fields, tensors, field named)

BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("append", A, {"k": KV1}, "tensors.v"),
    ("append", A, {"k": KV1, "v": KV1, "q": Q1}, "tensors.q"),
    ("append", {"sequences": ["a"]}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "layer": LAYERS}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "layer": -1}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "layer": True}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "layer": "0"}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "layer": 0.0}, {"k": KV1, "v": KV1}, "layer"),
    ("append", {**A, "sequences": []}, {"k": KV1, "v": KV1}, "sequences"),
    ("append", {**A, "sequences": ["a", "a"]}, {"k": KV2, "v": KV2}, "sequences"),
    ("append", {**A, "sequences": ["a b"]}, {"k": KV1, "v": KV1}, "sequences.0"),
    ("append", {**A, "sequences": ["a\n"]}, {"k": KV1, "v": KV1}, "sequences.0"),
    ("append", {**A, "sequences": ["x" * 129]}, {"k": KV1, "v": KV1}, "sequences.0"),
    ("append", {**A, "sequences": [""]}, {"k": KV1, "v": KV1}, "sequences.0"),
    ("append", {**A, "append_indptr": [0]}, {"k": KV1, "v": KV1}, "append_indptr"),
    ("append", {**A, "append_indptr": [1, 1]}, {"k": KV1, "v": KV1}, "append_indptr"),
    ("append", {**A, "append_indptr": [0, 2]}, {"k": KV1, "v": KV1}, "append_indptr"),
    ("append", {**A, "append_indptr": [0, 2**31]}, {"k": KV1, "v": KV1}, "append_indptr.1"),
    ("append", {**A, "append_indptr": [0, -1]}, {"k": KV1, "v": KV1}, "append_indptr.1"),
    ("append", {**A, "offsets": [0, 0]}, {"k": KV1, "v": KV1}, "offsets"),
    ("append", {**A, "offsets": [-1]}, {"k": KV1, "v": KV1}, "offsets.0"),
    ("append", A, {"k": KV2, "v": KV2}, "k.shape"),
    ("append", A, {"k": KV1, "v": KV2}, "v.shape"),
    ("append", A, {"k": KV1[:, :1], "v": KV1[:, :1]}, "k.shape"),
    ("append", A, {"k": KV1[..., :-1], "v": KV1[..., :-1]}, "k.shape"),
    ("append", A, {"k": KV1[0], "v": KV1[0]}, "k.shape"),
    ("append", A, {"k": KV1.astype(np.float64), "v": KV1}, "k.dtype"),
    ("append", A, {"k": KV1.astype(np.uint8), "v": KV1}, "k.dtype"),
    ("append", {**A, "causal": True}, {"k": KV1, "v": KV1}, "causal"),
    ("decode", A, {}, "tensors.q"),
    ("decode", A, {"q": Q1, "k": KV1}, "tensors.v"),
    ("decode", A, {"q": Q1, "v": KV1}, "tensors.k"),
    ("decode", A, {"q": rows(ANY, 2, QO_HEADS)}, "q.shape"),
    ("decode", A, {"q": shape(1, QO_HEADS)}, "q.shape"),
    ("decode", A, {"q": shape(1, 3, HEAD_DIM)}, "q.shape"),
    ("decode", A, {"q": shape(1, 0, HEAD_DIM)}, "q.shape"),
    ("decode", A, {"q": shape(1, QO_HEADS, HEAD_DIM + 1)}, "q.shape"),
    ("decode", A, {"q": Q1.astype(np.float64)}, "q.dtype"),
    ("decode", A, {"q": Q1, "mask": np.ones(1, bool)}, "tensors.mask"),
    ("decode", {**A, "causal": True}, {"q": Q1}, "causal"),
    ("decode", {**A, "sm_scale": 0.0}, {"q": Q1}, "sm_scale"),
    ("decode", {**A, "sm_scale": -1.0}, {"q": Q1}, "sm_scale"),
    ("decode", {**A, "sm_scale": 1e300}, {"q": Q1}, "sm_scale"),
    ("decode", {**A, "sm_scale": "1"}, {"q": Q1}, "sm_scale"),
    ("decode", {**A, "logits_soft_cap": -1.0}, {"q": Q1}, "logits_soft_cap"),
    ("decode", {**A, "logits_soft_cap": 1e-300}, {"q": Q1}, "logits_soft_cap"),
    ("decode", {**A, "window_left": -2}, {"q": Q1}, "window_left"),
    ("decode", {**A, "window_left": 1.5}, {"q": Q1}, "window_left"),
    ("decode", {**A, "lse_base": "10"}, {"q": Q1}, "lse_base"),
    ("decode", {**A, "cascade": "maybe"}, {"q": Q1}, "cascade"),
    ("prefill", A, {"q": Q1}, "qo_indptr"),
    ("prefill", {**A, "qo_indptr": [0, 0]}, {"q": Q1}, "qo_indptr"),
    ("prefill", {**A, "qo_indptr": [0, 1]}, {"q": Q1, "k": KV2, "v": KV2}, "k.shape"),
    ("prefill", {**A, "qo_indptr": [0, 1]}, {"q": Q1, "mask": np.ones(1, np.uint8)}, "mask.dtype"),
    (
        "prefill",
        {**A, "qo_indptr": [0, 1]},
        {"q": Q1, "mask": np.ones((1, 1), bool)},
        "mask.shape",
    ),
    (
        "prefill",
        {**A, "qo_indptr": [0, 1]},
        {"q": Q1, "packed_mask": np.ones(1, bool)},
        "packed_mask.dtype",
    ),
    (
        "prefill",
        {**A, "qo_indptr": [0, 1]},
        {"q": Q1, "mask": np.ones(1, bool), "packed_mask": np.ones(1, np.uint8)},
        "tensors.packed_mask",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 1], "cascade": "auto"},
        {"q": Q1, "k": KV1, "v": KV1},
        "cascade",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 0, 1]},
        {"q": Q1, "k": KV1, "v": KV1},
        "kv_indptr",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0], "kv_indptr": [0]},
        {"q": Q1, "k": KV1, "v": KV1},
        "qo_indptr",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 1]},
        {"q": Q1, "k": shape(1, 0, HEAD_DIM), "v": shape(1, 0, HEAD_DIM)},
        "k.shape",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 1]},
        {"q": Q1, "k": shape(1, 3, HEAD_DIM), "v": shape(1, 3, HEAD_DIM)},
        "q.shape",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 1]},
        {"q": Q1, "k": KV1, "v": KV1, "mask": np.ones(2, bool)},
        "mask.shape",
    ),
    (
        "ragged-prefill",
        {"qo_indptr": [0, 1], "kv_indptr": [0, 2]},
        {"q": Q1, "k": KV2, "v": KV2, "packed_mask": np.ones(2, np.uint8)},
        "packed_mask.shape",
    ),
    ("cascade", {"layer": 0, "levels": []}, {"q": Q1}, "levels"),
    ("cascade", {"layer": 0, "levels": [{"sequences": ["a"]}]}, {"q": Q1}, "levels.0.qo_indptr"),
    (
        "cascade",
        {"layer": 0, "levels": [{"sequences": ["a"], "qo_indptr": [0, 2]}]},
        {"q": Q1},
        "levels.0.qo_indptr",
    ),
    (
        "cascade",
        {"layer": 0, "levels": [{"sequences": ["a", "a"], "qo_indptr": [0, 1, 1]}]},
        {"q": Q1},
        "levels.0.sequences",
    ),
    (
        "cascade",
        {"layer": 0, "levels": [{"sequences": ["a"], "qo_indptr": [0, 1]}], "window_left": 3},
        {"q": Q1},
        "window_left",
    ),
    ("merge", {}, {"o": Q1}, "tensors.lse"),
    ("merge", {}, {"o": Q1, "lse": np.zeros((1, QO_HEADS), np.float32)}, "o.shape"),
    (
        "merge",
        {"indptr": [0, 1]},
        {"o": Q1, "lse": np.zeros((1, QO_HEADS), np.float16)},
        "lse.dtype",
    ),
    (
        "merge",
        {"indptr": [0, 1]},
        {"o": Q1, "lse": np.zeros((2, QO_HEADS), np.float32)},
        "lse.shape",
    ),
    (
        "merge",
        {"indptr": [0, 2]},
        {"o": Q1, "lse": np.zeros((1, QO_HEADS), np.float32)},
        "indptr",
    ),
    ("gather", {**A, "dtype": "fp8_e4m3"}, {}, "dtype"),
    ("gather", A, {"q": Q1}, "tensors.q"),
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


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_another_length_than_the_pool_says_changes_nothing(
    client: httpx.Client, packed: bool, media: str
) -> None:
    create(client, "a")
    append(client, 0, "a", KV2, KV2)
    mask = {"packed_mask": np.ones(2, np.uint8)} if packed else {"mask": np.ones(2, bool)}
    fields = {**A, "qo_indptr": [0, 1]}
    response = post(client, "/v1/prefill", fields, {"q": Q1, "k": KV1, "v": KV1, **mask}, media)
    check_problem(response, 422, "invalid_request", field=next(iter(mask)))
    assert client.get("/v1/sequences/a").json()["lengths"] == [2, 0]


@pytest.mark.parametrize(
    ("name", "tensor", "field"),
    [
        ("q", {"dtype": "F99", "shape": [], "data": []}, "tensors.q.dtype"),
        ("q", {"dtype": "F32", "shape": [2], "data": [1]}, "tensors.q.data"),
        ("q", {"dtype": "F32", "shape": [-1], "data": []}, "tensors.q.shape"),
        ("q", {"dtype": "F32", "shape": [2**62, 2**62, 0], "data": []}, "tensors.q.shape"),
        ("q", {"dtype": "F32", "shape": [1], "data": ["1"]}, "tensors.q.data"),
        ("q", {"dtype": "F32", "shape": [1], "data": [True]}, "tensors.q.data"),
        ("q", {"dtype": "F32", "shape": [1], "data": [[1]]}, "tensors.q.data"),
        ("q", {"dtype": "F16", "shape": [1], "data": [70000]}, "tensors.q.data"),
        ("q", {"dtype": "F32", "shape": [1], "data": [10**400]}, "tensors.q.data"),
        ("q", {"dtype": "U8", "shape": [1], "data": [256]}, "tensors.q.data"),
        ("q", {"dtype": "U8", "shape": [1], "data": [1.0]}, "tensors.q.data"),
        ("q", {"dtype": "BOOL", "shape": [1], "data": [2]}, "tensors.q.data"),
        ("q", {"dtype": "F32", "shape": [1]}, "tensors.q"),
        ("q", [1.0], "tensors.q"),
    ],
)
def test_a_json_tensor_that_breaks_a_rule_is_named_in_the_error(
    client: httpx.Client, name: str, tensor: Any, field: str
) -> None:
    response = client.post("/v1/decode", json={**A, "tensors": {name: tensor}})
    check_problem(response, 422, "invalid_request", field=field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "sequences"),
        ({"sequences": []}, "sequences"),
        ({"sequences": [{"id": "a"}, {"id": "a"}]}, "sequences"),
        ({"sequences": [{"id": "a/b"}]}, "sequences.0.id"),
        ({"sequences": [{"length": 1}]}, "sequences.0"),
        ({"sequences": [{"id": "a", "color": 1}]}, "sequences.0.color"),
    ],
)
def test_sequences_that_break_a_rule_are_not_made(
    client: httpx.Client, fields: Any, field: str
) -> None:
    response = client.post("/v1/sequences", json=fields)
    check_problem(response, 422, "invalid_request", field=field)
    assert client.get("/v1/sequences").json()["sequences"] == []


def test_a_fork_or_a_cut_beyond_the_length_is_refused(client: httpx.Client) -> None:
    create(client, "a")
    fork = {"sequences": [{"id": "b", "parent": "a", "length": 1}]}
    check_problem(client.post("/v1/sequences", json=fork), 422, "invalid_request")
    cut = client.post("/v1/sequences/a/truncate", json={"length": 1})
    check_problem(cut, 422, "invalid_request", field="length")


def test_a_fork_of_a_sequence_whose_layers_differ_says_its_length(client: httpx.Client) -> None:
    create(client, "a")
    append(client, 0, "a", KV2, KV2)
    silent = {"sequences": [{"id": "b", "parent": "a"}]}
    problem = check_problem(client.post("/v1/sequences", json=silent), 422, "invalid_request")
    assert problem["field"] == "parent" and "length = 0" in problem["rule"], problem
    (reply,) = create(client, {"id": "b", "parent": "a", "length": 0})
    assert reply["lengths"] == [0] * LAYERS


def test_levels_that_share_pages_are_refused(client: httpx.Client) -> None:
    create(client, "a")
    for layer in range(LAYERS):
        append(client, layer, "a", rows(ANY, PAGE_SIZE), rows(ANY, PAGE_SIZE))
    create(client, {"id": "b", "parent": "a"})
    levels = [{"sequences": [name], "qo_indptr": [0, 1]} for name in "ab"]
    response = post(client, "/v1/cascade", {"layer": 0, "levels": levels}, {"q": Q1})
    check_problem(response, 422, "invalid_request", field="levels")


@pytest.mark.parametrize("path", ["/v1/info?x=1", "/v1/sequences?limit=0", "/v1/sequences?x=1"])
def test_query_parameters_that_a_route_does_not_take_are_refused(
    client: httpx.Client, path: str
) -> None:
    check_problem(client.get(path), 422, "invalid_request")


@pytest.mark.parametrize("deadline", ["0", "0.5", "-1", "soon", "nan", "inf", "1e9", ""])
def test_a_deadline_that_is_none_is_refused(client: httpx.Client, deadline: str) -> None:
    headers = {"x-attnd-deadline-ms": deadline}
    create(client, "a")
    response = post(client, "/v1/gather", A, headers=headers)
    check_problem(response, 422, "invalid_request", field="X-Attnd-Deadline-Ms")


def test_merging_nothing_into_a_huge_answer_is_refused(client: httpx.Client) -> None:
    fields = {"indptr": [0] * 20_000}
    tensors = {"o": shape(0, 1024, 1024), "lse": np.zeros((0, 1024), np.float32)}
    check_problem(post(client, "/v1/merge", fields, tensors), 422, "invalid_request")
    dense = {"o": shape(2**20, 0, 64, 64), "lse": np.zeros((2**20, 0, 64), np.float32)}
    check_problem(post(client, "/v1/merge", {}, dense), 422, "invalid_request")


# 507


def test_out_of_pages_has_the_numbers_and_changes_nothing(client: httpx.Client, media: str) -> None:
    create(client, "a", "b")
    append(client, 0, "a", rows(ANY, 5), rows(ANY, 5))
    n = PAGES * PAGE_SIZE
    kv = {"k": shape(n, KV_HEADS, HEAD_DIM), "v": shape(n, KV_HEADS, HEAD_DIM)}
    fields = {"layer": 0, "sequences": ["b"], "append_indptr": [0, n]}
    response = post(client, "/v1/append", fields, kv, media)
    check_problem(response, 507, "out_of_pages", needed=PAGES, free=PAGES - 2, total=PAGES)
    assert client.get("/v1/sequences/b").json()["lengths"] == [0, 0]


# 500


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


def test_a_header_length_that_lies_is_malformed(client: httpx.Client) -> None:
    good = write_body(SAFETENSORS, A, {"q": Q1})
    for length in (0, 1, len(good) - 7, 2**32, 2**63, 2**64 - 1):
        body = struct.pack("<Q", length) + good[8:]
        headers = {"content-type": SAFETENSORS}
        response = client.post("/v1/decode", content=body, headers=headers)
        check_problem(response, 400, "malformed_body")
