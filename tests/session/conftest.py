"""One service for all steps, left by each test as it was; and an engine that plays a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.session.scripted_engine import Bench
from tests.session.stepping import Served, embed, serve

EMBEDDED = pytest.param(embed, marks=pytest.mark.long, id="embedded")


@pytest.fixture(scope="session", params=[pytest.param(serve, id="process"), EMBEDDED])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with request.param("cpu", tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(str(tmp_path / "s"))) as made:
        yield made
