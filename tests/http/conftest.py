"""Fixtures over a real socket: one service for all tests, and a fresh client for each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from http_messages import JSON, SAFETENSORS
from http_service import Service, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    """A client; whatever sequences a test made are deleted after it."""
    with service.client() as one:
        yield one
        while names := [seq["id"] for seq in one.get("/v1/sequences").json()["sequences"]]:
            for name in names:
                one.delete(f"/v1/sequences/{name}")
        pool = one.get("/v1/pool").json()
        assert (pool["referenced"], pool["integrity"]) == (0, "ok"), pool


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture(params=[SAFETENSORS, JSON], ids=["safetensors", "json"])
def media(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
