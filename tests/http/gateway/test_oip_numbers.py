"""tritonclient, over HTTP and gRPC, gets from every operation what `/v1` gives as JSON."""

from __future__ import annotations

from typing import Any

import httpx
import ml_dtypes
import numpy as np
import oracle
import pytest
import tritonclient.http
from http_messages import HEAD_DIM, JSON, KV_HEADS, LAYERS, QO_HEADS, ask, create, rows, seen
from triton_callers import Triton, fill

from service.operations.table import BY_NAME

ANY = np.random.default_rng(5)
Q1, Q3, KV1 = rows(ANY, 1, QO_HEADS), rows(ANY, 3, QO_HEADS), rows(ANY, 1)
STATES, LSE = rows(ANY, 6, 3).reshape(2, 3, 3, HEAD_DIM), ANY.random((2, 3, 3)).astype(np.float32)
SINKS = ANY.standard_normal(QO_HEADS).astype(np.float32)
BF16 = ANY.standard_normal((3, 1, 8)).astype(ml_dtypes.bfloat16)
MASK = ANY.random(18) < 0.6
ON_A = {"layer": 1, "sequences": ["a"]}
LEVELS = [{"sequences": ["shared"], "qo_indptr": [0, 3]}, {"sequences": ["a"], "qo_indptr": [1, 3]}]


def prefix_sums(*sums: int) -> Any:
    return np.array(sums, np.int32)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "append, then decode": ("decode", {"q": Q1, "k": KV1, "v": KV1}, ON_A | {"sm_scale": 0.25}),
    "decode with sinks": ("decode", {"q": Q1, "sinks": SINKS}, ON_A),
    "prefill with a mask": (
        "prefill",
        {"qo_indptr": prefix_sums(0, 3), "q": Q3, "mask": MASK},
        ON_A | {"causal": True},
    ),
    "prefill with a packed mask": (
        "prefill",
        {"q": Q3, "packed_mask": np.packbits(MASK, bitorder="little")},
        ON_A | {"qo_indptr": [0, 3], "causal": True},
    ),
    "cascade with its levels": (
        "cascade",
        {"q": Q3},
        {"layer": 1, "levels": LEVELS, "return_levels": True},
    ),
    "merge": ("merge", {"o": STATES, "lse": LSE}, {}),
    "merge with sinks": ("merge", {"o": STATES, "lse": LSE, "sinks": SINKS[:3]}, {}),
    "gather": ("gather", {}, ON_A | {"start": 1, "dtype": "fp32"}),
    "ragged prefill of bf16": (
        "ragged_prefill",
        {"q": BF16[:1], "k": BF16, "v": BF16, "qo_indptr": prefix_sums(0, 1)},
        {"kv_indptr": [0, 3]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operation_gives_what_v1_gives(
    triton: Triton, client: httpx.Client, rng: np.random.Generator, case: str
) -> None:
    fill(triton, rng, "a", 6)
    fill(triton, rng, "shared", 9)
    create(client, {"id": "twin", "parent": "a"})
    model, inputs, fields = CASES[case]
    reply, tensors = triton.infer(model, inputs, **fields)
    lists = {name: array.tolist() for name, array in inputs.items() if array.dtype == np.int32}
    arrays = {name: array for name, array in inputs.items() if name not in lists}
    given = lists | fields | ({"sequences": ["twin"]} if "sequences" in fields else {})
    expected, wanted = ask(client, BY_NAME[model].path, given, arrays, JSON)
    assert (reply, tensors.keys()) == (expected, wanted.keys())
    for name, array in wanted.items():
        assert tensors[name].dtype == array.dtype, name
        np.testing.assert_array_equal(tensors[name], array, name)


def test_outputs_come_in_the_order_in_which_they_are_requested(
    triton: Triton, rng: np.random.Generator
) -> None:
    fill(triton, rng, "a", 6)
    fill(triton, rng, "shared", 9)
    names = ("lse.1", "o", "o.0", "lse")
    outputs = [triton.module.InferRequestedOutput(name) for name in names]
    fields = {"layer": 1, "levels": LEVELS, "return_levels": True}
    _, tensors = triton.infer("cascade", {"q": Q3}, {"outputs": outputs}, **fields)
    assert tuple(tensors) == names
    assert np.isneginf(tensors["lse.1"][0]).all()


@pytest.mark.parametrize("rows_of_q", [1, 600], ids=["short", "long, by the helper"])
def test_tensors_may_be_spelled_out_in_json(
    over_http: Triton, rng: np.random.Generator, rows_of_q: int
) -> None:
    q = rng.standard_normal((rows_of_q, 2, 8)).astype(np.float16)
    k = rng.standard_normal((3, 1, 8)).astype(np.float16)
    inputs = [
        over_http.input("q", q, binary_data=False),
        over_http.input("k", k),
        over_http.input("v", k, binary_data=False),
        over_http.input("kv_indptr", np.array([0, 3], np.int32), binary_data=False),
    ]
    outputs = [
        tritonclient.http.InferRequestedOutput("lse", binary_data=True),
        tritonclient.http.InferRequestedOutput("o", binary_data=False),
    ]
    parameters = {"qo_indptr": f"[0,{rows_of_q}]"}
    reply = over_http.client.infer(
        "ragged_prefill", inputs, outputs=outputs, parameters=parameters, request_id="mine"
    )
    o, lse = oracle.attend(q, k, k, seen(q, k), sm_scale=8**-0.5)
    np.testing.assert_allclose(reply.as_numpy("o").astype(np.float64), o, atol=4e-3)
    np.testing.assert_allclose(reply.as_numpy("lse"), lse, atol=1e-3)
    assert reply.get_response()["id"] == "mine"


def test_sequences_are_listed_described_cut_and_deleted(
    triton: Triton, rng: np.random.Generator
) -> None:
    fill(triton, rng, "a", 6)
    assert triton.infer("truncate", id="a", length=5)[0]["lengths"] == [5] * LAYERS
    reply, tensors = triton.infer("get_sequence", id="a")
    assert (reply["length"], tensors) == (5, {}) and "parent" not in reply
    listed, _ = triton.infer("list_sequences", limit=1)
    assert [one["id"] for one in listed["sequences"]] == ["a"]
    table, _ = triton.infer("page_table", sequences=["a"])
    assert len(table["kv_indices"]) == 2
    assert triton.infer("info")[0]["num_kv_heads"] == KV_HEADS
    assert triton.infer("delete_sequence", id="a") == ({}, {})
    assert triton.infer("pool")[0]["sequences"] == 0


def test_appends_cuts_and_commits_of_many_are_models(
    triton: Triton, rng: np.random.Generator
) -> None:
    names = ["a", "b"]
    triton.infer("create_sequences", sequences=[{"id": name} for name in names])
    k, v = (np.stack([rows(rng, 12) for _ in range(LAYERS)]) for _ in "kv")
    tensors = {
        "k": k,
        "v": v,
        "layers": np.arange(LAYERS, dtype=np.int32),
        "append_indptr": np.array([0, 8, 12], np.int32),
    }
    reply, _ = triton.infer("append", tensors, sequences=names)
    assert reply == {"lengths": [8, 4]}
    cut = {
        "lengths": np.array([2, 1], np.int32),
        "keep": np.array([4, 7, 3], np.int32),
        "keep_indptr": np.array([0, 2, 3], np.int32),
    }
    reply, _ = triton.infer("truncate_sequences", cut, sequences=names)
    assert [one["length"] for one in reply["sequences"]] == [4, 2]
    for layer in range(LAYERS):
        _, tensors = triton.infer("gather", layer=layer, sequences=names)
        np.testing.assert_array_equal(tensors["k"], k[layer][[0, 1, 4, 7, 8, 11]])
    ids = {
        "token_ids": np.array([1, 2, 3], np.uint32),
        "names_indptr": np.array([0, 2, 3], np.int32),
    }
    reply, _ = triton.infer("commit_sequences", ids, sequences=names)
    assert set(reply) == {"committed_lens", "num_pages", "last_keys"}


def test_a_sequence_goes_out_and_in_part_by_part(triton: Triton, rng: np.random.Generator) -> None:
    k, v = fill(triton, rng, "a", 21)
    reply, names = triton.infer("export_sequence", id="a", part_bytes=2**13)
    header, before = reply["header"], reply["digest"]
    assert header["num_parts"] > 1 and not names
    reply, _ = triton.infer("import_sequence", id="b", header=header, digest=before)
    assert (reply["state"], reply["next_part"]) == ("receiving", 0)
    for part in range(header["num_parts"]):
        request = {"generation": header["generation"], "part_bytes": header["part_bytes"]}
        reply, tensors = triton.infer(
            "export_sequence", id="a", part=part, before=before, **request
        )
        before = reply["digest"]
        triton.infer("import_sequence", tensors, id="b", part=part, digest=before)
    reply, _ = triton.infer("import_sequence", id="b", digest=before)
    assert reply["state"] == "done"
    _, tensors = triton.infer("gather", layer=1, sequences=["b"])
    np.testing.assert_array_equal(tensors["k"], k)
    np.testing.assert_array_equal(tensors["v"], v)
