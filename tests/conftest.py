"""The `backend` fixture: every semantic test of the kernels runs on the cpu and on a device.
Async tests run on a loop of their own.

Nothing here or under tests/kernels imports the service, so that this part of the suite runs on a
device machine with pytest, hypothesis, numpy, ml_dtypes, torch and cupy alone.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import cuda_devices, make_backend
from kernels.backend import Backend, Numerics, PoolGeometry

pytest_plugins = ["tests.harness.retry"]
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # an EmbeddedSession needs it from the start
LONG_FILE: Final = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.long", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which `-m` selects nothing, before they import Ray or transformers."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    selected = config.getoption("markexpr")
    if "not long" in selected:
        return True if LONG_FILE.search(text) else None
    for mark in ("long", "timing"):
        if selected.startswith(mark) and f"mark.{mark}" not in text:
            return True
    return None


def pytest_collection_finish() -> None:
    """Later collections skip all modules and tests: half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an async test on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@dataclass(slots=True)
class Backends:
    """Makes backends of one kind, `"cpu"` or `"cuda"`; all are closed when the test is over."""

    kind: str
    made: list[Backend] = field(default_factory=list)

    def __call__(
        self, geometry: PoolGeometry, *, poison: bool = True, numerics: Numerics = "fast"
    ) -> Backend:
        """A backend whose dead slots are NaN, so that a read of one shows. May be Unsupported."""
        backend = make_backend(self.kind, geometry, poison=poison, numerics=numerics)
        self.made.append(backend)
        return backend

    def close_all(self) -> None:
        while self.made:
            self.made.pop().close()


@pytest.fixture(autouse=True)
def own_level_of_logs() -> None:
    """An engine in this process, of another test, sets the level of the service's logs."""
    logging.getLogger("attnd").setLevel(logging.NOTSET)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backends]:
    if request.param == "cuda" and not cuda_devices():
        pytest.skip("no CUDA device")
    backends = Backends(request.param)
    yield backends
    backends.close_all()


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data for every test; its seed is printed with a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)
