"""The numbers of every tensor route, in both media types, against the dense float64 oracle."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import oracle
import pytest
from http_messages import (
    DTYPES,
    HEAD_DIM,
    JSON,
    QO_HEADS,
    SCALE,
    append,
    ask,
    check,
    create,
    fill,
    rows,
    seen,
)


def test_decode_equals_the_oracle(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    held = {name: fill(client, rng, name, n, 1) for name, n in (("a", 5), ("b", 1), ("c", 8))}
    create(client, "empty")
    q = rows(rng, 4, QO_HEADS)
    fields = {"layer": 1, "sequences": ["c", "a", "empty", "b"]}
    reply, tensors = ask(client, "/v1/decode", fields, {"q": q}, media)
    nothing = (rows(rng, 0), rows(rng, 0))
    for i, name in enumerate(fields["sequences"]):
        k, v = held.get(name, nothing)
        o, lse = oracle.attend(q[i : i + 1], k, v, seen(q[i : i + 1], k), sm_scale=SCALE)
        mine = {key: array[i : i + 1] for key, array in tensors.items()}
        check(mine, o, lse, f"row {i}, sequence {name}")
    assert reply == {"lse_base": "e", "levels": 1, "cascade": False}


@pytest.mark.parametrize("cascade", ["auto", "always", "never"])
def test_forks_decode_the_same_however_the_cascade_runs(
    client: httpx.Client, rng: np.random.Generator, cascade: str, media: str
) -> None:
    k, v = fill(client, rng, "root", 18, 1)
    names = [f"fork-{i}" for i in range(3)]
    create(client, *({"id": name, "parent": "root"} for name in names))
    own = {name: (rows(rng, i), rows(rng, i)) for i, name in enumerate(names)}
    for name, (new_k, new_v) in own.items():
        append(client, 1, name, new_k, new_v)
    q = rows(rng, 3, QO_HEADS)
    fields = {"layer": 1, "sequences": names, "cascade": cascade, "lse_base": "2"}
    reply, tensors = ask(client, "/v1/decode", fields, {"q": q}, media)
    for i, name in enumerate(names):
        keys, values = np.concatenate((k, own[name][0])), np.concatenate((v, own[name][1]))
        row = q[i : i + 1]
        o, lse = oracle.attend(row, keys, values, seen(row, keys), sm_scale=SCALE)
        mine = {key: array[i : i + 1] for key, array in tensors.items()}
        check(mine, o, lse / np.log(2), f"{cascade}, {name}")
    assert reply["lse_base"] == "2"
    if cascade != "auto":
        assert reply["cascade"] == (cascade == "always"), reply
        assert (reply["levels"] > 1) == (cascade == "always"), reply


@pytest.mark.parametrize(
    "rules",
    [{}, {"causal": True}, {"causal": True, "window_left": 3}, {"logits_soft_cap": 2.0}],
    ids=["plain", "causal", "window", "soft cap"],
)
def test_prefill_equals_the_oracle(
    client: httpx.Client, rng: np.random.Generator, rules: dict[str, Any], media: str
) -> None:
    held = {"a": fill(client, rng, "a", 6, 1), "b": fill(client, rng, "b", 3, 1)}
    qo_indptr = [0, 2, 7]
    q, new_k, new_v = rows(rng, 7, QO_HEADS), rows(rng, 7), rows(rng, 7)
    fields = {"layer": 1, "sequences": ["a", "b"], "qo_indptr": qo_indptr, **rules}
    _, reply = ask(client, "/v1/prefill", fields, {"q": q, "k": new_k, "v": new_v}, media)
    where = {name: rules[name] for name in ("causal", "window_left") if name in rules}
    cap = rules.get("logits_soft_cap", 0.0)
    for i, name in enumerate(fields["sequences"]):
        part = slice(qo_indptr[i], qo_indptr[i + 1])
        k = np.concatenate((held[name][0], new_k[part]))
        v = np.concatenate((held[name][1], new_v[part]))
        o, lse = oracle.attend(
            q[part], k, v, seen(q[part], k, **where), sm_scale=SCALE, logits_soft_cap=cap
        )
        mine = {key: array[part] for key, array in reply.items()}
        check(mine, o, lse, f"{rules}, sequence {name}")


@pytest.mark.parametrize("packed", [False, True], ids=["BOOL", "packed"])
def test_prefill_applies_masks_and_fully_masked_rows_are_empty(
    client: httpx.Client, rng: np.random.Generator, packed: bool, media: str
) -> None:
    held = {"a": fill(client, rng, "a", 5, 1), "b": fill(client, rng, "b", 7, 1)}
    q = rows(rng, 5, QO_HEADS)
    masks = {"a": rng.random((2, 5)) < 0.5, "b": rng.random((3, 7)) < 0.5}
    masks["b"][1] = False
    parts = [mask.reshape(-1) for mask in masks.values()]
    if packed:
        bits = [np.packbits(part, bitorder="little") for part in parts]
        tensors = {"q": q, "packed_mask": np.concatenate(bits)}
    else:
        tensors = {"q": q, "mask": np.concatenate(parts)}
    fields = {"layer": 1, "sequences": ["a", "b"], "qo_indptr": [0, 2, 5]}
    _, reply = ask(client, "/v1/prefill", fields, tensors, media)
    for name, part in (("a", slice(0, 2)), ("b", slice(2, 5))):
        k, v = held[name]
        o, lse = oracle.attend(q[part], k, v, seen(q[part], k, mask=masks[name]), sm_scale=SCALE)
        check({key: array[part] for key, array in reply.items()}, o, lse, f"mask of {name}")
    assert np.isneginf(reply["lse"][3]).all()


@pytest.mark.parametrize("mask", [None, "mask", "packed_mask"])
def test_ragged_prefill_equals_the_oracle_with_heads_of_its_own(
    client: httpx.Client, rng: np.random.Generator, mask: str | None, media: str
) -> None:
    q, k, v = rows(rng, 5, 3), rows(rng, 9, 1), rows(rng, 9, 1)
    qo, kv = [0, 2, 2, 5], [0, 4, 9, 9]
    fields = {"qo_indptr": qo, "kv_indptr": kv, "causal": True}
    parts = [rng.random((qo[i + 1] - qo[i], kv[i + 1] - kv[i])) < 0.6 for i in range(3)]
    tensors = {"q": q, "k": k, "v": v}
    if mask == "mask":
        tensors[mask] = np.concatenate([part.reshape(-1) for part in parts])
    elif mask == "packed_mask":
        bits = [np.packbits(part.reshape(-1), bitorder="little") for part in parts]
        tensors[mask] = np.concatenate(bits)
    _, reply = ask(client, "/v1/ragged-prefill", fields, tensors, media)
    for i, part in enumerate(parts):
        mine, keys = q[qo[i] : qo[i + 1]], slice(kv[i], kv[i + 1])
        rules = seen(mine, k[keys], causal=True, mask=part if mask else None)
        o, lse = oracle.attend(mine, k[keys], v[keys], rules, sm_scale=SCALE)
        slices = {key: array[qo[i] : qo[i + 1]] for key, array in reply.items()}
        check(slices, o, lse, f"request {i}, {mask}")


def test_explicit_cascade_merges_whole_sequences_and_reports_each_level(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    held = {name: fill(client, rng, name, n, 1) for name, n in (("s", 9), ("x", 2), ("y", 3))}
    q = rows(rng, 4, QO_HEADS)
    levels = [
        {"sequences": ["s"], "qo_indptr": [0, 4]},
        {"sequences": ["x", "y"], "qo_indptr": [0, 1, 3]},
    ]
    fields = {"layer": 1, "levels": levels, "return_levels": True}
    reply, tensors = ask(client, "/v1/cascade", fields, {"q": q}, media)
    assert reply["levels"] == 2
    for row, own in enumerate(("x", "y", "y", None)):
        mine = q[row : row + 1]
        empty = (rows(rng, 0), rows(rng, 0))
        states = [
            oracle.attend(mine, k, v, seen(mine, k), sm_scale=SCALE)
            for k, v in (held["s"], held[own] if own else empty)
        ]
        slices = {key: array[row : row + 1] for key, array in tensors.items()}
        check(slices, *oracle.merge(states), f"row {row}")
        for level, state in enumerate(states):
            names = (f"o.{level}", f"lse.{level}")
            check(slices, *state, f"row {row}, level {level}", names)


def test_merge_takes_dense_and_ragged_states(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    o = rows(rng, 6, 3)
    lse = rng.standard_normal((6, 3)).astype(np.float32)
    lse[1], o[1] = -np.inf, 0
    dense = {"o": o.reshape(3, 2, 3, HEAD_DIM), "lse": lse.reshape(3, 2, 3)}
    _, reply = ask(client, "/v1/merge", {}, dense, media)
    for t in range(3):
        pair = [(o[2 * t + i], lse[2 * t + i]) for i in range(2)]
        wanted = oracle.merge(pair)
        check({"o": reply["o"][t], "lse": reply["lse"][t]}, *wanted, f"dense {t}")
    indptr = [0, 0, 1, 6]
    reply_fields, reply = ask(client, "/v1/merge", {"indptr": indptr}, {"o": o, "lse": lse}, media)
    assert reply_fields == {"lse_base": "e"}
    check(
        {"o": reply["o"][0], "lse": reply["lse"][0]}, 0 * o[0], np.full(3, -np.inf), "an empty list"
    )
    wanted = oracle.merge([(o[i], lse[i]) for i in range(1, 6)])
    check({"o": reply["o"][2], "lse": reply["lse"][2]}, *wanted, "ragged")


def test_gather_returns_the_appended_rows(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    k, v = fill(client, rng, "a", 6, 1)
    create(client, {"id": "b", "parent": "a", "length": 3}, "empty")
    new_k, new_v = rows(rng, 2), rows(rng, 2)
    append(client, 1, "b", new_k, new_v)
    fields = {"layer": 1, "sequences": ["b", "empty", "a"]}
    reply, tensors = ask(client, "/v1/gather", fields, media=media)
    assert reply == {"kv_indptr": [0, 5, 5, 11]}
    np.testing.assert_array_equal(tensors["k"], np.concatenate((k[:3], new_k, k)))
    np.testing.assert_array_equal(tensors["v"], np.concatenate((v[:3], new_v, v)))
    _, wider = ask(client, "/v1/gather", {**fields, "dtype": "fp32"}, media=media)
    assert wider["k"].dtype == np.float32
    np.testing.assert_array_equal(wider["k"], tensors["k"].astype(np.float32))


@pytest.mark.parametrize(("name", "allowed"), [("F32", 1e-3), ("F16", 1e-3), ("BF16", 1e-2)])
def test_queries_of_any_float_get_outputs_of_their_own(
    client: httpx.Client, rng: np.random.Generator, name: str, allowed: float
) -> None:
    k, v = fill(client, rng, "a", 5, 1)
    q = rows(rng, 1, QO_HEADS).astype(DTYPES[name])
    _, reply = ask(client, "/v1/decode", {"layer": 1, "sequences": ["a"]}, {"q": q}, JSON)
    o, lse = oracle.attend(q, k, v, seen(q, k), sm_scale=SCALE)
    assert reply["o"].dtype == q.dtype
    np.testing.assert_allclose(reply["o"].astype(np.float64), o, atol=allowed, rtol=allowed)
    np.testing.assert_allclose(reply["lse"], lse, atol=1e-3)


def test_append_answers_the_lengths_of_its_layer(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    create(client, "a", "b")
    kv = {"k": rows(rng, 3), "v": rows(rng, 3)}
    fields = {"layer": 0, "sequences": ["b", "a"], "append_indptr": [0, 1, 3], "offsets": [0, 0]}
    assert ask(client, "/v1/append", fields, kv, media) == ({"lengths": [1, 2]}, {})
    one_each = {"k": rows(rng, 2), "v": rows(rng, 2)}
    fields = {"layer": 0, "sequences": ["a", "b"]}
    assert ask(client, "/v1/append", fields, one_each, media)[0] == {"lengths": [3, 2]}
