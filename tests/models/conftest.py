"""A running service for the models of a module, and sessions that leave its pool empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attnd import Client, Session

from tests.client.running_service import connect, service


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The socket of the engine of `client`'s service."""
    return str(tmp_path_factory.mktemp("r") / "road")


@pytest.fixture(scope="module")
def where(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, socket: str
) -> Iterator[str]:
    """The address of a service with as many pages as the module's `NUM_PAGES`."""
    arguments = ["--server.uds", str(tmp_path_factory.mktemp("s") / "s"), "--server.socket", socket]
    num_pages = getattr(request.module, "NUM_PAGES", 128)
    with service(*arguments, "--pool.num-pages", str(num_pages)) as address:
        yield address


@pytest.fixture(scope="module")
def client(where: str) -> Iterator[Client]:
    with connect(where) as client:
        yield client


@pytest.fixture
def session(client: Client, socket: str) -> Iterator[Session]:
    """A session; when it ends every sequence and page of the test must be free."""
    with Session(socket) as session:
        yield session
        pool = session.pool()
    assert (pool.sequences, pool.referenced, pool.integrity) == (0, 0, "ok")
