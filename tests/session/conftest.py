"""One service for all steps, left by each test as it was; and an engine that plays a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.session.scripted_engine import Bench
from tests.session.stepping import Served, serve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("cpu", tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(str(tmp_path / "s"))) as made:
        yield made
