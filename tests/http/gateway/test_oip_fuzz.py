"""Inference requests over HTTP, mutated at random: answered or refused, and the door stays up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import LAYERS, QO_HEADS, append, create, rows
from http_service import Service, serving

pytestmark = pytest.mark.long

CASES = 500
PATH = "/v2/models/{}/infer"
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 1e300, "", "a", "[]", "[1]", "{}", "null", "NaN", "\ud800"),
    *([], [[]], [0], {}, {"a": 1}, "FP32", "INT32", "BYTES", "FP8_E4M3", "q", "k", "o.0"),
    *(1024, 4096, 4095, 2**40, "fuzzed", "..", {"shared_memory_region": "fuzzed"}),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


def seeds(q: Any) -> list[tuple[str, dict[str, Any], bytes]]:
    """Requests that are right: their model, JSON and binary data."""
    size = {"parameters": {"binary_data_size": q.nbytes}}
    given = {"name": "q", "shape": list(q.shape), "datatype": "FP32"}
    fields = {"layer": 0, "sequences": '["a"]', "timeout": 5_000_000}
    binary = {"inputs": [given | size], "parameters": fields | {"binary_data_output": True}}
    outputs = [{"name": "o", "parameters": {"binary_data": False}}, {"name": "lse"}]
    spelled = {"inputs": [given | {"data": q.reshape(-1).tolist()}], "parameters": fields}
    return [
        ("decode", binary, q.tobytes()),
        ("decode", spelled | {"outputs": outputs, "id": "mine"}, b""),
        ("page_table", {"parameters": {"sequences": '["a"]', "layer": 1}}, b""),
        ("list_sequences", {"parameters": {"limit": 5, "after": "a"}}, b""),
    ]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every member of every object and list inside, as container and key."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def spoil(document: Any, chance: random.Random) -> Any:
    """The document with a member or two replaced, dropped or added."""
    spoiled = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 2)):
        container, key = chance.choice(places(spoiled) or [(spoiled, "id")])
        match chance.randrange(3):
            case 0 if isinstance(container, dict):
                container.pop(key, None)
            case 1 if isinstance(container, dict):
                container[chance.choice(("x", "data", "inputs", "name", "shape"))] = chance.choice(
                    ODD
                )
            case _:
                container[key] = deepcopy(chance.choice(ODD))
    return spoiled


def test_spoiled_requests_do_no_harm(
    client: httpx.Client, v2: httpx.Client, rng: np.random.Generator
) -> None:
    create(client, "a")
    k = rows(rng, 3)
    append(client, 0, "a", k, k)
    q = rows(rng, 1, QO_HEADS).astype(np.float32)
    spoil_all(v2, seeds(q))
    assert client.get("/v1/sequences/a").json()["lengths"] == [3, *[0] * (LAYERS - 1)]


def spoil_all(client: httpx.Client, good: list[tuple[str, dict[str, Any], bytes]]) -> None:
    before = ask(client, good[0], None).content
    chance = random.Random(13)
    seen: set[int] = set()
    for _ in range(CASES):
        response = ask(client, chance.choice(good), chance)
        seen.add(response.status_code)
        assert response.status_code < 500 or response.status_code in (501, 504), response.text
        if response.status_code != 200:
            problem = response.json()
            assert problem["error"] == f"{problem['code']}: {problem['detail']}"
    assert {200, 400, 422} <= seen, seen
    for one in good:
        assert ask(client, one, None).status_code == 200
    assert ask(client, good[0], None).content == before


def ask(
    client: httpx.Client, seed: tuple[str, dict[str, Any], bytes], chance: random.Random | None
) -> httpx.Response:
    """The request as it is, or spoiled: in its JSON, its data, or the length between them."""
    model, document, data = seed
    text = json.dumps(spoil(document, chance) if chance else document).encode()
    length = len(text)
    if chance is not None and chance.random() < 0.2:
        length = max(0, length + chance.choice((-1, 1, -length, 7, 10**6)))
    if chance is not None and chance.random() < 0.1:
        data = data[: chance.randrange(len(data) + 1)]
    headers = {"inference-header-content-length": str(length)} if data else {}
    return client.post(PATH.format(model), content=text + data, headers=headers)
