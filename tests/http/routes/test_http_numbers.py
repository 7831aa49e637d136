"""Decoded and gathered numbers in both media types, against the dense float64 oracle."""

from __future__ import annotations

import httpx
import numpy as np
import oracle
import pytest
from http_messages import (
    DTYPES,
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
