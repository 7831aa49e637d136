"""Everything marked gpu is skipped where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kernels import cuda_devices
from kernels.backend import DeviceLost


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if cuda_devices():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A backend on a fake device; for tests that need cupy but no device."""
    from tensor_rig import Rig

    made = Rig(monkeypatch)
    yield made
    with suppress(DeviceLost):  # a test may have lost it
        made.settle()
