"""Whose turn it is: small requests beside long ones, and long ones whose client has left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    JSON,
    KV_HEADS,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    append,
    ask,
    create,
    endless_prefill,
    fill,
    post,
    rows,
    write_body,
)
from http_service import Service, needs_a_slow_device, serving

from tests.harness.waiting import wait_for

A = {"layer": 0, "sequences": ["a"]}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--pool.num-pages", "512", "--engine.slice-ms", "10") as running:
        yield running


def is_idle(service: Service) -> bool:
    return not service.engine.jobs


@contextmanager
def beside_a_long_prefill(service: Service) -> Iterator[None]:
    """A client asks for a prefill of many minutes, and hangs up in the end."""
    body = write_body(SAFETENSORS, *endless_prefill())
    head = f"POST /v1/ragged-prefill HTTP/1.1\r\nhost: localhost\r\ncontent-type: {SAFETENSORS}\r\n"
    with service.connect() as peer:
        peer.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: not is_idle(service), "the prefill to begin")
        yield
        assert not is_idle(service), "the prefill was over too soon to say anything"
    wait_for(lambda: is_idle(service), "the prefill to be stopped")


@needs_a_slow_device
def test_small_decodes_have_their_turns_beside_a_long_prefill_that_ends_with_its_client(
    service: Service, client: httpx.Client, rng: np.random.Generator
) -> None:
    fill(client, rng, "a", 5)
    q = {"q": rows(rng, 1, QO_HEADS)}
    _, alone = ask(client, "/v1/decode", A, q)
    with beside_a_long_prefill(service):
        for _ in range(5):
            _, beside = ask(client, "/v1/decode", A, q)
            np.testing.assert_array_equal(beside["o"], alone["o"])
        fill(client, rng, "b", 5)
        assert client.delete("/v1/sequences/b").status_code == 204
    line = 'code="client_gone",op="ragged_prefill"'
    wait_for(lambda: line in client.get("/metrics").text, "the prefill's client to count as gone")


def lives_meanwhile(service: Service, work: Future[Any]) -> tuple[float, list[float]]:
    """Seconds that the work still took, and the seconds of each /health/live meanwhile."""
    took: list[float] = []
    started = monotonic()
    with service.client() as client:
        while not work.done():
            request = monotonic()
            assert client.get("/health/live").status_code == 200
            took.append(monotonic() - request)
    return monotonic() - started, took


def long_answer(client: httpx.Client) -> httpx.Response:
    return post(client, "/v1/gather", {"layer": 0, "sequences": ["big"]}, media=JSON)


def long_request(client: httpx.Client) -> httpx.Response:
    numbers = [0.125] * (KV_HEADS * HEAD_DIM * 1900)
    one = {"dtype": "F32", "shape": [1900, KV_HEADS, HEAD_DIM], "data": numbers}
    fields = {"layer": 0, "sequences": ["big"], "append_indptr": [0, 1900]}
    body = json.dumps(fields | {"tensors": {"k": one, "v": one}})
    return client.post("/v1/append", content=body, headers={"content-type": JSON})


@pytest.mark.timing
@pytest.mark.parametrize("asked", [long_answer, long_request])
def test_long_json_stalls_no_other_client(
    service: Service,
    client: httpx.Client,
    rng: np.random.Generator,
    pool: ThreadPoolExecutor,
    asked: Callable[[httpx.Client], httpx.Response],
) -> None:
    create(client, "big")
    if asked is long_answer:
        kv = rng.standard_normal((1100, KV_HEADS, HEAD_DIM)).astype(WIRE_DTYPE)
        append(client, 0, "big", kv, kv)

    def ask_thrice() -> list[int]:
        with service.client() as another:
            return [asked(another).status_code for _ in range(3)]

    work = pool.submit(ask_thrice)
    seconds, took = lives_meanwhile(service, work)
    assert work.result()[0] == 200, work.result()
    assert len(took) > 10, f"{len(took)} answers in {seconds:.1f} s"
    assert max(took) < seconds / 2, f"one took {max(took):.2f} s of {seconds:.2f} s"
