"""Errors of the Open Inference Protocol's doors, as tritonclient reads them; nothing changes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import KV_HEADS, LAYERS, PAGES, QO_HEADS, check_problem, rows
from http_service import Service, serving
from triton_callers import Triton, gateway_of
from tritonclient.utils import InferenceServerException

from service.gateway import requests
from tests.harness.waiting import wait_for

Q1: Any = np.zeros((1, QO_HEADS, 64), np.float32)
KV1: Any = np.zeros((1, KV_HEADS, 64), np.float32)


def refused(triton: Triton, model: str, *given: Any, **fields: Any) -> tuple[str, str]:
    """The status, as gRPC names it, and the message of a refusal."""
    with pytest.raises(InferenceServerException) as reply:
        triton.infer(model, *given, **fields)
    return status(reply.value), reply.value.message()


def status(error: InferenceServerException) -> str:
    return str(error.status()).removeprefix("StatusCode.")


ON_A: dict[str, Any] = {"layer": 0, "sequences": ["a"]}
LONG = np.zeros((2000, KV_HEADS, 64), np.float32)
DECODE, APPEND = {"q": Q1}, {"k": KV1, "v": KV1}
INDPTR = np.array([0, 1], np.int32)
BAD, INVALID = "400 INVALID_ARGUMENT", "422 INVALID_ARGUMENT"
REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "an unknown sequence": (
        *("decode", DECODE, ON_A | {"sequences": ["b"]}),
        *("404 NOT_FOUND", "unknown_sequence: unknown sequence: b"),
    ),
    "an id that is taken": (
        *("create_sequences", {}, {"sequences": [{"id": "a"}]}),
        *("409 ALREADY_EXISTS", "sequence_exists: sequence exists already: a"),
    ),
    "offsets that are not true": (
        *("append", APPEND, ON_A | {"offsets": [3]}, "409 FAILED_PRECONDITION", "a has 0"),
    ),
    "offsets as an input that are not true": (
        *("append", APPEND | {"offsets": np.array([3], np.int32)}, ON_A),
        *("409 FAILED_PRECONDITION", "a has 0"),
    ),
    "a parameter that the model has not": (
        *("decode", DECODE, ON_A | {"causal": True}, INVALID),
        "causal = True: this route has no such field",
    ),
    "a parameter that is no JSON": (
        *("decode", DECODE, ON_A | {"sequences": "a"}, BAD, "parameter sequences is not JSON"),
    ),
    "an input that the model has not": (
        *("decode", DECODE | {"mask": np.ones(1, bool)}, ON_A, INVALID),
        "tensors.mask = given: this route reads no such tensor",
    ),
    "a datatype that the input cannot have": (
        *("decode", {"q": Q1.astype(np.float64)}, ON_A, INVALID),
        "q.dtype = F64: must be one of F32, F16, BF16",
    ),
    "an indptr of two dimensions": (
        *("prefill", DECODE | {"qo_indptr": INDPTR[None]}, ON_A, INVALID, "qo_indptr.shape"),
    ),
    "an indptr given twice": (
        *("prefill", DECODE | {"qo_indptr": INDPTR}, ON_A | {"qo_indptr": [0, 1]}, INVALID),
        "is given twice",
    ),
    "more tokens than there are pages": (
        *("append", {"k": LONG, "v": LONG}, ON_A | {"append_indptr": [0, 2000]}),
        *("507 RESOURCE_EXHAUSTED", f"out_of_pages: 500 pages needed, {PAGES} of {PAGES} are"),
    ),
    "no such model": ("attend", {}, {}, "404 NOT_FOUND", "no model 'attend'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why_and_changes_nothing(triton: Triton, case: str) -> None:
    model, inputs, fields, statuses, words = REFUSALS[case]
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    how, message = refused(triton, model, inputs, **fields)
    assert how in statuses.split() and words in message, (how, message)
    assert triton.infer("get_sequence", id="a")[0]["lengths"] == [0] * LAYERS


def test_an_output_that_is_not_there_is_refused(triton: Triton) -> None:
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    level = {"sequences": ["a"], "qo_indptr": [0, 1]}

    def asking(*names: str) -> str:
        outputs = [triton.module.InferRequestedOutput(name) for name in names]
        options = {"outputs": outputs}
        return refused(triton, "cascade", {"q": Q1}, options, layer=0, levels=[level])[1]

    assert "model cascade has no such output" in asking("p")
    assert "model cascade has no such output" in asking("o.x")
    assert "is requested twice" in asking("o", "o")
    assert "this request has no such output" in asking("o.0")


def test_there_is_one_version(triton: Triton) -> None:
    assert triton.infer("pool", {}, {"model_version": "1"})[0]["sequences"] == 0
    how, message = refused(triton, "pool", {}, {"model_version": "2"})
    assert how in ("404", "NOT_FOUND") and "the only one is 1" in message
    with pytest.raises(InferenceServerException):
        triton.client.get_model_metadata("pool", "2")


def test_a_timeout_that_passes_is_the_engines_deadline(triton: Triton, service: Service) -> None:
    triton.infer("create_sequences", sequences=[{"id": "a"}])
    triton.infer("append", {"k": KV1, "v": KV1}, layer=0, sequences=["a"])
    how, message = refused(triton, "decode", {"q": Q1}, {"timeout": -1}, layer=0, sequences=["a"])
    assert how in ("422", "INVALID_ARGUMENT") and "timeout = -1" in message
    how, message = refused(triton, "decode", {"q": Q1}, {"timeout": 1}, layer=0, sequences=["a"])
    assert how in ("504", "DEADLINE_EXCEEDED") and "deadline_exceeded" in message


def test_a_service_that_drains_is_not_ready() -> None:
    with (
        serving() as service,
        gateway_of(service) as gateway,
        gateway.http() as http,
        gateway.grpc() as grpc,
    ):
        for made in (http, grpc):
            assert made.client.is_server_ready() and made.client.is_model_ready("decode")
        service.engine.drain()
        wait_for(lambda: not grpc.client.is_server_ready(), "the gateway to hear of it")
        assert not grpc.client.is_model_ready("decode") and grpc.client.is_server_live()
        assert not http.client.is_server_ready() and not http.client.is_model_ready("decode")
        states = {one.state for one in grpc.client.get_model_repository_index().models}
        assert states == {"UNAVAILABLE"}
        assert refused(grpc, "pool")[0] == "UNAVAILABLE"
        assert refused(http, "pool")[0] == "503"


# requests that no client library makes


def binary(
    v2: httpx.Client, model: str, document: Any, data: bytes, **headers: str
) -> httpx.Response:
    text = json.dumps(document).encode()
    given = {"inference-header-content-length": str(len(text)), **headers}
    return v2.post(f"/v2/models/{model}/infer", content=text + data, headers=given)


def q_input(size: int, **more: Any) -> dict[str, Any]:
    reply = {"name": "q", "shape": [1, QO_HEADS, 64], "datatype": "FP32"}
    return {"inputs": [{**reply, "parameters": {"binary_data_size": size}}], **more}


def check_error(response: httpx.Response, status: int, words: str) -> None:
    problem = check_problem(response, status, response.json()["code"])
    assert words in problem["error"], problem
    assert problem["error"] == f"{problem['code']}: {problem['detail']}"


@pytest.mark.parametrize(
    ("document", "size", "status", "words"),
    [
        (
            q_input(1024),
            1020,
            400,
            "1020 bytes follow the JSON, the inputs' binary_data_size are 1024",
        ),
        (q_input(1024), 1028, 400, "1028 bytes follow the JSON"),
        (q_input(1000), 1000, 422, "q.data = 1000 bytes: its shape needs 1024"),
        (q_input(-1), 0, 422, "binary_data_size = -1: must be greater than or equal to 0"),
        (q_input(1024, extra=1), 1024, 422, "extra = 1: this route has no such field"),
        (q_input(1024, parameters=[]), 1024, 422, "parameters = []: must be an object"),
        (q_input(1024, id=7), 1024, 422, "id = 7: must be text"),
        (q_input(1024, outputs={}), 1024, 422, "outputs = {}: must be a list"),
        (q_input(1024, outputs=[{"name": 1}]), 1024, 422, "outputs.0.name = 1"),
        (q_input(1024, parameters={"sequences": {"a": [0]}}), 1024, 422, "sequences = "),
        ({"inputs": [1]}, 0, 422, "inputs.0 = 1: must be an object"),
        ({"inputs": [{"name": "q", "datatype": "FP32"}]}, 0, 422, "inputs.0.shape = None: must be"),
        (
            {"inputs": [{"name": "q", "datatype": "FP32", "shape": [-1]}]},
            0,
            422,
            "inputs.0.shape.0",
        ),
        ({"inputs": [{"name": "q", "datatype": "FP32", "shape": [2**62] * 8}]}, 0, 422, "q.shape"),
        ({"inputs": [{"name": "q", "datatype": "FP32", "shape": [1]}]}, 0, 422, "q.data"),
        ({"inputs": [{"name": "q", "datatype": "FP9", "shape": [1]}]}, 0, 422, "q.datatype = FP9"),
        ([], 0, 400, "the request is not a JSON object"),
    ],
)
def test_a_malformed_request_over_http_gets_the_error_twice(
    v2: httpx.Client, document: Any, size: int, status: int, words: str
) -> None:
    check_error(binary(v2, "decode", document, bytes(size)), status, words)


def test_data_may_be_nested_and_only_so_deep(v2: httpx.Client) -> None:
    def merge(data: Any, shape: list[int]) -> httpx.Response:
        o = {"name": "o", "shape": [1, 2, 1, 2], "datatype": "FP32", "data": data}
        lse = {"name": "lse", "shape": shape, "datatype": "FP32", "data": [0, "-Infinity"]}
        return v2.post("/v2/models/merge/infer", json={"inputs": [o, lse]})

    nested = [[[[1, 2]], [[3, 4]]]]
    answer = merge(nested, [1, 2, 1])
    assert answer.status_code == 200, answer.text
    outputs = {one["name"]: one for one in answer.json()["outputs"]}
    assert outputs["o"] == {"name": "o", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    check_error(merge(deep, [1, 2, 1]), 422, "o.data")
    check_error(merge([[]], [1, 2, 1]), 422, "o.data = 0 bytes: its shape needs 16")
    check_error(merge([[1, "x"]], [1, 2, 1]), 422, "o.data")
    check_error(merge(nested, [0]), 422, "lse.data")


def test_an_output_may_be_spelled_out_where_the_others_are_binary(v2: httpx.Client) -> None:
    o = {"name": "o", "shape": [1, 2, 1, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    lse = {"name": "lse", "shape": [1, 2, 1], "datatype": "FP32", "data": [0, "-Infinity"]}
    outputs = [{"name": "o", "parameters": {"binary_data": False}}]
    body = {"inputs": [o, lse], "outputs": outputs, "parameters": {"binary_data_output": True}}
    answer = v2.post("/v2/models/merge/infer", json=body)
    assert answer.headers["content-type"] == "application/json", answer.text
    (found,) = answer.json()["outputs"]
    assert found["data"] == [1, 2]


@pytest.mark.parametrize("length", ["-1", "x", "99999", "9" * 20, "1e1"])
def test_a_wrong_length_of_the_json_is_refused(v2: httpx.Client, length: str) -> None:
    headers = {"inference-header-content-length": length}
    response = v2.post("/v2/models/pool/infer", content=b"{}", headers=headers)
    check_error(response, 422, "Inference-Header-Content-Length")


@pytest.mark.parametrize("is_alone", [True, False])
def test_json_is_read_up_to_its_limit_and_refused_beyond(v2: httpx.Client, is_alone: bool) -> None:
    """The limit is for the JSON, not for the data behind it."""
    for size in (2**20 - 1, 2**20, 2**20 + 1):
        text = b"{" + b" " * (size - 2) + b"}"
        headers = {} if is_alone else {"inference-header-content-length": f"{size}"}
        data = b"" if is_alone else b"12345678"
        response = v2.post("/v2/models/pool/infer", content=text + data, headers=headers)
        if size > 2**20:
            check_error(response, 422, f"JSON = {size} bytes: at most 1048576")
        elif is_alone:
            assert response.status_code == 200, response.text
        else:
            check_error(response, 400, "8 bytes follow the JSON")


def test_errors_under_v2_have_the_protocols_form(v2: httpx.Client) -> None:
    check_error(v2.get("/v2/models/pool/infer"), 405, "use POST")
    check_error(v2.get("/v2/models/nothing"), 404, "no model 'nothing'")
    check_error(v2.get("/v2/nothing"), 404, "not_found")
    check_error(v2.get("/v2/models/pool?x=1"), 422, "takes no parameters")
    response = v2.post("/v2/models/pool/infer", content=b"{}", headers={"content-encoding": "gzip"})
    check_error(response, 415, "send the body unencoded")
    check_error(v2.post("/v2/models/pool/infer"), 400, "the request is not JSON")


def test_a_chunked_body_and_one_without_tensors_are_answered(
    client: httpx.Client, v2: httpx.Client, rng: np.random.Generator
) -> None:
    client.post("/v1/sequences", json={"sequences": [{"id": "a"}]})
    k = rows(rng, 1).astype(np.float32)
    inputs = [
        {"name": name, "shape": list(k.shape), "datatype": "FP32"}
        | {"parameters": {"binary_data_size": k.nbytes}}
        for name in ("k", "v")
    ]
    parameters = {"layer": 0, "sequences": ["a"]}  # a list as it is does as well
    text = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    answer = v2.post(
        "/v2/models/append/versions/1/infer",
        content=iter([text, k.tobytes(), k.tobytes()]),
        headers={"inference-header-content-length": str(len(text))},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["parameters"] == {"lengths": "[1]"}
    answer = v2.post("/v2/models/get_sequence/infer", json={"parameters": {"id": "a"}})
    assert answer.json()["parameters"]["length"] == 0
    assert answer.headers["content-type"] == "application/json"


def test_an_answer_too_long_for_json_is_refused_before_anything_changes(
    over_http: Triton, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_VALUES", 8 * QO_HEADS * 64 - 1)
    over_http.infer("create_sequences", sequences=[{"id": "a"}])
    k, q = (np.zeros((8, heads, 64), np.float32) for heads in (KV_HEADS, QO_HEADS))
    options = {"outputs": [over_http.module.InferRequestedOutput("o", binary_data=False)]}
    fields = {"layer": 0, "sequences": ["a"], "qo_indptr": [0, 8]}
    how, message = refused(over_http, "prefill", {"q": q, "k": k, "v": k}, options, **fields)
    assert how == "422" and "request binary_data_output" in message
    assert client.get("/v1/sequences/a").json()["lengths"] == [0] * LAYERS
    over_http.infer("prefill", {"q": q, "k": k, "v": k}, **fields)


def test_models_are_reported(triton: Triton, v2: httpx.Client) -> None:
    models = v2.post("/v2/repository/index", json={"ready": True}).json()
    assert {one["state"] for one in models} == {"READY"}
    for one in models:
        metadata = v2.get(f"/v2/models/{one['name']}").json()
        config = v2.get(f"/v2/models/{one['name']}/versions/1/config").json()
        assert [given["name"] for given in config["input"]] == [
            given["name"] for given in metadata["inputs"]
        ]
        assert json.loads(config["parameters"]["fields"]["string_value"])["type"] == "object"
        by_client = triton.client.get_model_metadata(one["name"])
        name = by_client["name"] if isinstance(by_client, dict) else by_client.name
        assert name == one["name"]
        triton.client.get_model_config(one["name"])
    assert triton.client.is_server_live() and triton.client.is_server_ready()


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_shared_memory_regions_are_not_supported(
    v2: httpx.Client, triton: Triton, kind: str
) -> None:
    response = v2.post(f"/v2/{kind}sharedmemory/region/x/register")
    assert check_problem(response, 404, "not_found")["error"]
    with pytest.raises(InferenceServerException) as reply:
        getattr(triton.client, f"get_{kind}_shared_memory_status")()
    assert status(reply.value) in ("404", "UNIMPLEMENTED")


def test_a_tensor_in_a_region_is_not_supported(triton: Triton) -> None:
    given = triton.module.InferInput("q", Q1.shape, "FP32").set_shared_memory("rows", Q1.nbytes)
    wanted = triton.module.InferRequestedOutput("o")
    wanted.set_shared_memory("rows", Q1.nbytes)
    sent = triton.input("q", Q1)
    for inputs, outputs in (([given], None), ([sent], [wanted])):
        with pytest.raises(InferenceServerException) as reply:
            triton.client.infer("decode", inputs, outputs=outputs, parameters={"layer": 0})
        assert status(reply.value) in ("501", "UNIMPLEMENTED")
        assert "shared memory regions are not supported" in reply.value.message()
