"""Real engines as processes, for tests that only read or clean up, and one's own to kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.cluster.membership.local_engines import LocalEngines, local_engines
from tests.cluster.harness import SETTINGS


@pytest.fixture(scope="module")
def two_engines() -> Iterator[LocalEngines]:
    with local_engines(2, SETTINGS) as engines:
        yield engines


@pytest.fixture(scope="session")
def three_engines() -> Iterator[LocalEngines]:
    """For tests that leave them as they were."""
    with local_engines(3, SETTINGS) as engines:
        yield engines


@pytest.fixture
def mortal_engines() -> Iterator[LocalEngines]:
    """Three of a test's own, which may kill them."""
    with local_engines(3, SETTINGS) as engines:
        yield engines
