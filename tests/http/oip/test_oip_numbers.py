"""tritonclient, over HTTP and gRPC, gets the oracle's numbers from every tensor operation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import pytest
import tritonclient.http
from http_messages import HEAD_DIM, KV_HEADS, LAYERS, QO_HEADS, SCALE, check, rows, seen
from triton_callers import Triton, fill


def test_decode_appends_first_and_says_how_it_ran(triton: Triton, rng: np.random.Generator) -> None:
    k, v = fill(triton, rng, "a", 5)
    q, new_k, new_v = rows(rng, 1, QO_HEADS), rows(rng, 1), rows(rng, 1)
    reply, tensors = triton.infer(
        "decode", {"q": q, "k": new_k, "v": new_v}, layer=1, sequences=["a"], sm_scale=0.25
    )
    k, v = np.concatenate((k, new_k)), np.concatenate((v, new_v))
    check(tensors, *oracle.attend(q, k, v, seen(q, k), sm_scale=0.25), "decode")
    assert reply == {"lse_base": "e", "levels": 1, "cascade": False}


@pytest.mark.parametrize("packed", [False, True], ids=["BOOL", "packed"])
def test_prefill_takes_masks_and_an_indptr_as_an_input(
    triton: Triton, rng: np.random.Generator, packed: bool
) -> None:
    k, v = fill(triton, rng, "a", 6)
    q = rows(rng, 3, QO_HEADS)
    mask = rng.random((3, 6)) < 0.6
    flat = np.packbits(mask.reshape(-1), bitorder="little") if packed else mask.reshape(-1)
    inputs = {
        "qo_indptr": np.array([0, 3], np.int32),
        "q": q,
        "packed_mask" if packed else "mask": flat,
    }
    _, tensors = triton.infer("prefill", inputs, layer=1, sequences=["a"], causal=True)
    visible = seen(q, k, causal=True, mask=mask)
    check(tensors, *oracle.attend(q, k, v, visible, sm_scale=SCALE), "a masked prefill")


def test_an_explicit_cascade_answers_the_levels_that_are_asked_for(
    triton: Triton, rng: np.random.Generator
) -> None:
    shared, own = fill(triton, rng, "shared", 9), fill(triton, rng, "own", 3)
    q = rows(rng, 2, QO_HEADS)
    levels = [
        {"sequences": ["shared"], "qo_indptr": [0, 2]},
        {"sequences": ["own"], "qo_indptr": [1, 2]},
    ]
    names = ("o", "lse", "o.0", "lse.0", "lse.1")
    outputs = [triton.module.InferRequestedOutput(name) for name in names]
    _, tensors = triton.infer(
        "cascade",
        {"q": q},
        {"outputs": outputs},
        layer=1,
        levels=levels,
        return_levels=True,
    )
    assert tuple(tensors) == names
    first = oracle.attend(q, *shared, seen(q, shared[0]), sm_scale=SCALE)
    check(tensors, *first, "level 0", ("o.0", "lse.0"))
    second = oracle.attend(q[1:], *own, seen(q[1:], own[0]), sm_scale=SCALE)
    merged = oracle.merge([(first[0][1:], first[1][1:]), second])
    check({name: tensors[name][:1] for name in ("o", "lse")}, first[0][:1], first[1][:1], "row 0")
    check({name: tensors[name][1:] for name in ("o", "lse")}, *merged, "row 1")
    assert np.isneginf(tensors["lse.1"][0]).all()


def test_merge_and_gather(triton: Triton, rng: np.random.Generator) -> None:
    o, lse = rows(rng, 6, 3).reshape(2, 3, 3, HEAD_DIM), rng.random((2, 3, 3)).astype(np.float32)
    reply, tensors = triton.infer("merge", {"o": o, "lse": lse})
    merged = oracle.merge([(o[:, i], lse[:, i]) for i in range(3)])
    check(tensors, *merged, "a merge")
    assert reply == {"lse_base": "e"}
    k, v = fill(triton, rng, "a", 5)
    reply, tensors = triton.infer("gather", layer=1, sequences=["a"], start=1, dtype="fp32")
    assert reply == {"kv_indptr": [0, 4]}
    np.testing.assert_array_equal(tensors["k"], k[1:].astype(np.float32))
    np.testing.assert_array_equal(tensors["v"], v[1:].astype(np.float32))


def test_sinks_are_an_input(triton: Triton, rng: np.random.Generator) -> None:
    k, v = fill(triton, rng, "a", 6)
    q, sinks = rows(rng, 1, QO_HEADS), rng.standard_normal(QO_HEADS).astype(np.float32)
    _, tensors = triton.infer("decode", {"q": q, "sinks": sinks}, layer=1, sequences=["a"])
    state = oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE)
    sink = np.zeros(q.shape), sinks[None]
    check(tensors, *oracle.merge([state, sink]), "a decode with sinks")
    states = {"o": np.stack([q, q], 1), "lse": np.zeros((1, 2, QO_HEADS), np.float32)}
    _, tensors = triton.infer("merge", states | {"sinks": sinks})
    both = [(q.astype(np.float64), np.zeros((1, QO_HEADS)))] * 2
    check(tensors, *oracle.merge([*both, sink]), "a merge with sinks")


def test_bf16_comes_and_goes_as_raw_bytes(triton: Triton, rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 2, 8)).astype(ml_dtypes.bfloat16)
    k = rng.standard_normal((3, 1, 8)).astype(ml_dtypes.bfloat16)
    _, tensors = triton.infer(
        "ragged_prefill", {"q": q, "k": k, "v": k}, qo_indptr=[0, 1], kv_indptr=[0, 3]
    )
    o, lse = oracle.attend(q, k, k, seen(q, k), sm_scale=8**-0.5)
    assert tensors["o"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(tensors["o"].astype(np.float64), o, atol=2e-2)
    np.testing.assert_allclose(tensors["lse"], lse, atol=1e-2)


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
