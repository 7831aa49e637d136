"""What keeps an engine from starting; a fresh CPU engine knows how long attention takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from config.settings import EngineSettings, Settings
from kernels import make_backend
from kernels.backend import Attend, PoolGeometry
from service.engine.loop import selftest
from service.engine.loop.selftest import SelfTestFailed
from service.engine.work.work import Cost
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import Caller, running_engine, with_engine
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


GEOMETRY = PoolGeometry(2, 4, 16, 1, 32, dtype="fp16")


@pytest.mark.parametrize(("slower", "believed"), [(0.5, 1.0), (8.0, 8.0), (900.0, 16.0)])
def test_a_fresh_engine_cuts_attention_by_a_measurement(
    monkeypatch: pytest.MonkeyPatch, slower: float, believed: float
) -> None:
    """Attention takes `slower` times the first guess, and ten times that when it first runs."""
    now, calls = [0.0], [0]
    backend: Any = make_backend("cpu", GEOMETRY)
    attend = backend.attend

    def timed(requests: list[Attend]) -> Any:
        if requests[0].q.shape[0] == selftest.ROWS:
            now[0] += selftest.GUESSED_S * slower * (1 if calls[0] else 10)
            calls[0] += 1
        return attend(requests)

    monkeypatch.setattr(backend, "attend", timed)
    monkeypatch.setattr(selftest, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with running_engine(backend, Settings(engine=EngineSettings(slice_ms=20.0))) as running:
        pace = running.engine.store.pace
        work = Cost(4e9 * 0.001)  # a millisecond by the first guess
        assert pace.seconds("attend", work) == pytest.approx(0.001 * believed, rel=0.1)
        assert pace.num_slices("attend", Cost(4e9 * 0.1)) == pytest.approx(5 * believed, rel=0.1)
    assert 2 <= calls[0] <= selftest.MEASUREMENTS
