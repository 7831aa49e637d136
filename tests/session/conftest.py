"""One service for all steps: each test leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.session.stepping import Served, serve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("cpu", tmp_path_factory.mktemp("served")) as running:
        yield running
