"""The kinds of clients that most tests run for, and a service for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.client.client_stub import Kind
from tests.client.running_service import connect, service


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every test with this argument runs for `Client` and for `AsyncClient`."""
    found: Kind = request.param
    return found


class Served(NamedTuple):
    """Paths of a service's socket for HTTP, and of its engine's."""

    uds: str
    road: str

    @property
    def address(self) -> str:
        return f"unix:{self.uds}"


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running service that is ready."""
    folder = tmp_path_factory.mktemp("s")
    paths = Served(f"{folder}/s", f"{folder}/road")
    with service("--server.uds", paths.uds, "--server.socket", paths.road) as address:
        connect(address).close()
        yield paths
