"""What keeps an engine from starting."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import make_backend
from service.engine.selftest import SelfTestFailed
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import Caller, with_engine
from tests.engine.pool_model import CPU_GEOMETRY


class Wrong:
    """The CPU backend, with one number of every output off by a tenth."""

    def __init__(self) -> None:
        self.inner = make_backend("cpu", CPU_GEOMETRY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(self, requests: Any) -> Any:
        pending = self.inner.attend(requests)
        for request in requests:
            request.out.o[-1, -1, -1] += 0.1
        return pending


async def never(_: Caller) -> None:
    raise AssertionError("the engine started")


def test_a_backend_that_computes_wrongly_never_becomes_ready() -> None:
    with pytest.raises(SelfTestFailed, match=r"prefill: o\[7, 3, 15\] is .*, must be"):
        with_engine(Wrong(), never)


def test_a_backend_that_fails_in_the_self_test_says_why() -> None:
    backend = FakeBackend()
    backend.failures["attend"] = [RuntimeError("no such kernel")]
    with pytest.raises(RuntimeError, match="no such kernel"):
        with_engine(backend, never)


def test_the_self_test_runs_in_slices_as_well() -> None:
    async def scenario(caller: Caller) -> None:
        assert caller.state == "ready"

    with_engine(make_backend("cpu", CPU_GEOMETRY, poison=True), scenario, slice_ms=1e-6)
