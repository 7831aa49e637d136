"""Engines as processes, and clusters of them for async tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.cluster.harness import SETTINGS, Cluster, run
from tests.cluster.local_engines import LocalEngines, local_engines


@pytest.fixture(scope="session")
def two_engines() -> Iterator[LocalEngines]:
    """For tests that leave them as they were."""
    with local_engines(2, SETTINGS) as engines:
        yield engines


@pytest.fixture(scope="session")
def three_engines() -> Iterator[LocalEngines]:
    """For tests that leave them as they were."""
    with local_engines(3, SETTINGS) as engines:
        yield engines


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalEngines]:
    """The engines of an async test; `pytest_pyfunc_call` gives it a `Cluster` of them."""
    engines: LocalEngines = request.getfixturevalue(getattr(request, "param", "two_engines"))
    yield engines
    for name, process in engines.processes.items():
        if process.poll() is not None:  # the test killed it, and failed
            engines.start(name)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an async test with a router over the engines of its fixture `cluster`."""
    names = inspect.signature(pyfuncitem.obj).parameters.keys()
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or "cluster" not in names:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in names - {"cluster"}}

    async def test(cluster: Cluster) -> None:
        await pyfuncitem.obj(cluster=cluster, **given)

    run(pyfuncitem.funcargs["cluster"], test)
    return True
