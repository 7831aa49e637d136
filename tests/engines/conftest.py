"""Adapters over records in a dict, in engines of which only the interface is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from attnd.engines import store as store_module
from attnd.engines.options import StoreOptions
from attnd.engines.store import EngineStore
from engines import interfaces
from engines.records import OPTIONS, Records


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """What every store of the test is connected to."""
    one = Records()
    monkeypatch.setattr(store_module, "connect", lambda _: one)
    return one


@pytest.fixture
def store(records: Records) -> EngineStore:
    return EngineStore(StoreOptions.read(OPTIONS), "a stamp")


@pytest.fixture
def engines() -> Iterator[None]:
    """The engines' interfaces in `sys.modules`, and the adapters imported over them."""
    before = dict(sys.modules)
    sys.modules.update(interfaces.modules())
    yield
    for name in set(sys.modules) - before.keys():
        if name.split(".")[0] in interfaces.ENGINES or name.startswith(interfaces.ADAPTERS):
            del sys.modules[name]
