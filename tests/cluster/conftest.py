"""Two real engines as processes, for all tests of a file that only read or clean up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_calls import SETTINGS

from service.cluster.local import LocalEngines, local_engines


@pytest.fixture(scope="module")
def two_engines() -> Iterator[LocalEngines]:
    with local_engines(2, SETTINGS) as engines:
        yield engines
