"""The kinds of clients that most tests run for, and two services for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from attnd import AsyncClient, Client, Session

from tests.client.client_stub import Awaited, Kind
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


@pytest.fixture(scope="session")
def there() -> Iterator[str]:
    """The URL of a second service, which reads bodies of at most 1 MiB."""
    with service("--server.port", "0", "--server.max-body-bytes", str(2**20)) as url:
        yield url


@pytest.fixture
def client(here: Served) -> Iterator[Client]:
    with connect(here.address) as client:
        yield client
        clear(client)


@pytest.fixture
def other(there: str) -> Iterator[Client]:
    """A client of the second service."""
    with connect(there) as client:
        yield client
        clear(client)


@pytest.fixture(params=["client", "async client", "session"])
def caller(here: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A test with this argument runs by every way in; all its methods block."""
    if request.param == "client":
        made: Any = Client(uds=here.uds)
    elif request.param == "session":
        made = Session(here.road)
    else:
        made = Awaited(AsyncClient(uds=here.uds))
    with made:
        yield made
        clear(made)


def clear(client: Any) -> None:
    """Delete everything, and see that nothing leaked."""
    client.delete_sequences(prefix="")
    client.clear()
    pool = client.pool()
    assert (pool.referenced, pool.cached, pool.pinned, pool.imports) == (0, 0, 0, 0)
    assert pool.integrity == "ok"
