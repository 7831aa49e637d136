"""Long JSON: turned over in a process of its own, within limits, while others are served."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np
import pytest
from images import write_image
from scripted import JSON, SAFETENSORS, Running, decode_body, post, request, serving, wait_for

from service.doors.http import long_json
from service.doors.http.long_json_worker import Order, Result
from service.keys import line_of, new_key

COUNT = 100_000


def long_request() -> dict[str, object]:
    data = [round(value, 3) for value in np.random.default_rng(1).random(COUNT).tolist()]
    tensors = {"q": {"dtype": "F32", "shape": [COUNT, 1, 1], "data": data}}
    return {"layer": 0, "sequences": ["a"], "tensors": tensors}


def test_long_json_becomes_an_image_and_an_image_becomes_long_json(
    door: Running, client: httpx.Client
) -> None:
    sent = long_request()
    response = client.post("/v1/decode", json=sent)
    assert response.status_code == 200, response.text
    (heard,) = door.engine.heard
    wanted = np.array(sent["tensors"]["q"]["data"], np.float32)  # type: ignore[index]
    np.testing.assert_array_equal(heard.tensors["q"].reshape(-1), wanted)
    answered = response.json()
    np.testing.assert_array_equal(np.array(answered["tensors"]["q"]["data"], np.float32), wanted)
    assert door.door.long_json.process is not None


def test_errors_in_long_json_equal_errors_in_short_json(client: httpx.Client) -> None:
    sent = long_request()
    sent["tensors"]["q"]["data"][-1] = "x"  # type: ignore[index]
    problem = client.post("/v1/decode", json=sent).json()
    assert (problem["code"], problem["field"]) == ("invalid_request", "tensors.q.data")
    headers = {"content-type": JSON}
    response = client.post("/v1/decode", content=b"[" * 100_000, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "malformed_body")
    given = json.dumps({"id": "b", "length": 1, "x": "y" * 100_000}).encode()
    response = client.post("/v1/sequences/a/truncate", content=given, headers=headers)
    assert (response.status_code, response.json()["field"]) == (422, "id")


def test_an_answer_too_long_for_json_names_the_way_out(tmp_path: Path) -> None:
    k = np.full((100_000, 2), 1 / 3, np.float32)
    answer = write_image({}, {"k": k}, "response")
    with (
        serving(
            tmp_path, "--server.max-json-bytes", "1000000", script=lambda heard: answer
        ) as running,
        running.client() as client,
    ):
        problem = client.post("/v1/gather", json={"layer": 0}).json()
        assert (problem["status"], problem["code"]) == (413, "answer_too_large")
        assert problem["size"] > problem["limit"] == 1_000_000
        assert "Accept: application/vnd.safetensors" in problem["detail"]
        headers = {"accept": SAFETENSORS}
        response = client.post("/v1/gather", json={"layer": 0}, headers=headers)
        assert response.content == answer


def test_what_changes_the_pool_is_not_called_for_an_answer_that_json_may_not_hold(
    tmp_path: Path,
) -> None:
    limit = 200_000
    with serving(tmp_path, "--server.max-json-bytes", str(limit)) as running:
        with running.client() as client:
            response = post(client, "/v1/decode", decode_body(10_000), accept=JSON)
            assert response.json()["code"] == "answer_too_large"
        (heard,) = running.engine.heard
        assert heard.capacity * 2 < limit, "the engine could see that it does not fit"


def test_namespaces_take_turns_with_long_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: new_key() for name in "ab"}
    lines = [line_of(key, name, ("read",)) + "\n" for name, key in keys.items()]
    (tmp_path / "keys").write_text("".join(lines))
    may_end, begun, round_trip = threading.Event(), list[int](), long_json.round_trip

    def slow(connection: Connection, order: Order) -> Result:
        if order.given is not None:
            begun.append(order.length)
            may_end.wait(10)
        return round_trip(connection, order)

    monkeypatch.setattr(long_json, "round_trip", slow)
    monkeypatch.setattr(long_json, "MAX_WAITING", 2)

    def ask(name: str, length: int) -> int:
        headers = {"content-type": JSON, "authorization": f"Bearer {keys[name]}"}
        content = b'{"x":"%s"}' % (b"y" * (length - 8))
        with running.client() as client:
            return client.post("/v1/gather", content=content, headers=headers).status_code

    options = ("--auth.keys-file", str(tmp_path / "keys"))
    with serving(tmp_path, *options) as running, ThreadPoolExecutor(4) as threads:
        lock = running.door.long_json.lock
        asked = [threads.submit(ask, "a", 70_000)]
        wait_for(lambda: len(begun) == 1, "the first")
        for count in (1, 2):
            asked.append(threads.submit(ask, "a", 70_000 + count))
            wait_for(lambda count=count: lock.num_waiting("a") == count, "the next")
        assert ask("a", 70_009) == 429
        asked.append(threads.submit(ask, "b", 80_000))
        wait_for(lambda: lock.num_waiting("b") == 1, "the other namespace")
        may_end.set()
        assert [one.result() for one in asked] == [200] * 4
    assert begun == [70_000, 70_001, 80_000, 70_002]


def test_a_client_that_leaves_does_not_upset_the_process(
    door: Running, client: httpx.Client
) -> None:
    body = json.dumps(long_request()).encode()
    for _ in range(5):
        with door.connect() as peer:
            peer.sendall(request("/v1/decode", body, content_type=JSON))
    response = client.post("/v1/decode", json=long_request())
    assert response.status_code == 200


def test_a_process_that_dies_is_started_again(door: Running, client: httpx.Client) -> None:
    assert client.post("/v1/decode", json=long_request()).status_code == 200
    door.door.long_json.process.kill()
    statuses = [client.post("/v1/decode", json=long_request()).status_code for _ in range(2)]
    assert statuses[1] == 200


def test_the_process_ends_when_it_has_nothing_to_do(
    door: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.doors.http.long_json.IDLE_S", 0.05)
    assert client.post("/v1/decode", json=long_request()).status_code == 200
    wait_for(lambda: door.door.long_json.process is None, "its end")
    assert client.post("/v1/decode", json=long_request()).status_code == 200
