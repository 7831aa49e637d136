"""Whose turn it is: small requests beside long ones, and long ones whose client has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from http_messages import (
    QO_HEADS,
    SAFETENSORS,
    ask,
    endless_prefill,
    fill,
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
