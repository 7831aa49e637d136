"""One door before one scripted engine for a whole module; tests that need others make their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted import Running, as_sent, serving


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("road")) as running:
        yield running


@pytest.fixture
def door(shared: Running) -> Iterator[Running]:
    """The module's door; its engine's script, gate and memory are as new for each test."""
    engine = shared.engine
    engine.script = as_sent
    engine.heard.clear()
    engine.cancelled.clear()
    yield shared
    engine.open_gate()


@pytest.fixture
def client(door: Running) -> Iterator[httpx.Client]:
    with door.client() as one:
        yield one
