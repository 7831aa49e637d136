"""Inference requests that become images where they came, and answers that are sent from there."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from images import read_image
from scripted import Running

Q = np.arange(4, dtype=np.float32).reshape(1, 2, 2)


def body(inputs: list[tuple[str, Any]], **parameters: Any) -> tuple[bytes, int]:
    """A request with binary inputs; and how much of it is JSON."""
    datatypes = {"f4": "FP32", "i4": "INT32"}
    entries = [
        {"name": name, "datatype": datatypes[array.dtype.str[1:]], "shape": list(array.shape)}
        | {"parameters": {"binary_data_size": array.nbytes}}
        for name, array in inputs
    ]
    parameters["binary_data_output"] = True
    text = json.dumps({"inputs": entries, "parameters": parameters}).encode()
    return b"".join([text, *(array.tobytes() for _, array in inputs)]), len(text)


def infer(client: httpx.Client, model: str, given: tuple[bytes, int]) -> httpx.Response:
    headers = {"inference-header-content-length": str(given[1])}
    response = client.post(f"/v2/models/{model}/infer", content=given[0], headers=headers)
    assert response.status_code == 200, response.text
    return response


INDPTR = np.array([0, 1], np.int32)
LONG = [f"sequence-{number}" for number in range(3000)]


@pytest.mark.parametrize(
    ("inputs", "fields", "in_place"),
    [
        ([("q", Q)], {}, True),
        ([("qo_indptr", INDPTR), ("q", Q)], {"qo_indptr": [0, 1]}, True),
        ([("q", Q), ("qo_indptr", INDPTR)], {"qo_indptr": [0, 1]}, True),
        ([("q", Q), ("k", Q), ("v", Q)], {}, True),
        ([("q", Q), ("qo_indptr", INDPTR), ("k", Q), ("v", Q)], {"qo_indptr": [0, 1]}, False),
    ],
)
def test_the_engine_reads_tensors_where_they_came(
    door: Running, client: httpx.Client, inputs: Any, fields: Any, in_place: bool
) -> None:
    given = body(inputs, layer=0, sequences='["a"]')
    infer(client, "prefill", given)
    (heard,) = door.engine.heard
    image = read_image(heard.image)
    assert image.fields == {"layer": 0, "sequences": ["a"], **fields}
    tensors = {name: array for name, array in inputs if name != "qo_indptr"}
    assert image.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(image.tensors[name], array)
    start = 8 + int.from_bytes(heard.image[:8], "little")
    assert (start > given[1]) == in_place, "the header replaces the JSON, and starts before it"
    if in_place and inputs[0][0] == "q":
        assert start % 64 == 0


@pytest.mark.parametrize("sequences", [["a"], LONG], ids=["short", "long, by the helper"])
def test_replies_are_sent_from_the_arena(
    door: Running, client: httpx.Client, sequences: list[str]
) -> None:
    given = body([("q", Q)], layer=0, sequences=json.dumps(sequences), timeout=2_000_000)
    response = infer(client, "decode", given)
    (heard,) = door.engine.heard
    assert heard.deadline_s == 2.0
    assert heard.fields["sequences"] == sequences
    length = int(response.headers["inference-header-content-length"])
    reply = json.loads(response.content[:length])
    assert json.loads(reply["parameters"]["sequences"]) == sequences
    (output,) = reply["outputs"]
    assert output["parameters"] == {"binary_data_size": Q.nbytes}
    assert response.content[length:] == Q.tobytes()


def test_a_large_answer_is_sent_whole(door: Running, client: httpx.Client) -> None:
    q = np.random.default_rng(0).random((500, 20, 40), np.float32)
    response = infer(client, "decode", body([("q", q)], layer=0, sequences="[]"))
    length = int(response.headers["inference-header-content-length"])
    assert response.content[length:] == q.tobytes()
