"""A running service for the models of a module, and sessions that leave its pool empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attnd import Client, Session
from attnd.torch import EmbeddedSession, TorchSession

from tests.client.running_service import POOL, connect, service


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
    with Session(socket) as session, all_is_free(client):
        yield session


@pytest.fixture
def torch_session(client: Client, socket: str) -> Iterator[TorchSession]:
    with TorchSession(socket) as session, all_is_free(client):
        yield session


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[EmbeddedSession]:
    """A session whose engine is in this process, of the same size."""
    pool = {f"pool.{name}": value for name, value in POOL.items()}
    num_pages = getattr(request.module, "NUM_PAGES", 128)
    settings = {"backend.kind": "cpu", **pool, "pool.num-pages": num_pages}
    with EmbeddedSession(settings) as session:
        yield session


@pytest.fixture
def embedded_session(engine: EmbeddedSession) -> Iterator[EmbeddedSession]:
    with all_is_free(engine):
        yield engine


@pytest.fixture(params=["session", "torch_session", "embedded_session"])
def either(request: pytest.FixtureRequest) -> Session:
    """A test with this argument runs layer by layer, and in steps."""
    made: Session = request.getfixturevalue(request.param)
    return made


@contextmanager
def all_is_free(client: Client | Session) -> Iterator[None]:
    """When a test ends every sequence and page of it must be free."""
    yield
    pool = client.pool()
    assert (pool.sequences, pool.referenced, pool.integrity) == (0, 0, "ok")
