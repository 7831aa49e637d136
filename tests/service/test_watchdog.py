"""Watchdogs: a long pass is logged with its operation and counted; a short one is not."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from service.metrics import Metrics
from service.processes import watchdog as watchdog_module
from service.processes.watchdog import LIMIT_S, LoopWatchdog, Watchdog


def slow_passes(metrics: Metrics) -> list[str]:
    lines = metrics.render()[0].decode().splitlines()
    return [line for line in lines if line.startswith("attnd_slow_passes_total{")]


def test_a_long_pass_is_logged_with_its_longest_operation(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("engine")
    watchdog = Watchdog("engine", metrics)
    watchdog.note("decode", 0.01)
    watchdog.passed(LIMIT_S)
    assert not caplog.messages
    for name, seconds in (("decode", 0.02), ("page_table", 0.3), ("gather", 0.1)):
        watchdog.note(name, seconds)
    watchdog.passed(0.45)
    (text,) = caplog.messages
    assert "0.450 s" in text and "page_table, 0.300 s" in text
    assert slow_passes(metrics) == ['attnd_slow_passes_total{op="page_table",process="engine"} 1.0']
    watchdog.passed(0.2)
    assert "no single operation" in caplog.messages[1], "an operation counts in its own pass"


def test_many_slow_passes_of_one_operation_are_one_line_a_minute_and_all_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, clock = Metrics("engine"), [100.0]
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock[0])
    watchdog = Watchdog("engine", metrics)

    def prefill() -> None:
        watchdog.note("prefill", 0.3)
        watchdog.passed(0.3)

    for _ in range(8):
        prefill()
        clock[0] += 1.0
    assert len(caplog.messages) == 1
    clock[0] += watchdog_module.QUIET_S
    prefill()
    assert len(caplog.messages) == 2 and "7 more since" in caplog.messages[1]
    assert slow_passes(metrics) == ['attnd_slow_passes_total{op="prefill",process="engine"} 9.0']


def test_a_pass_that_holds_up_an_event_loop_is_logged_with_its_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics("http-0")

    def hold_up(operation: SimpleNamespace) -> None:
        ends = time.monotonic() + 4 * LIMIT_S
        while time.monotonic() < ends:
            pass

    async def scenario() -> None:
        watchdog = LoopWatchdog("http-0", metrics)
        await asyncio.sleep(LIMIT_S)
        caplog.clear()
        hold_up(SimpleNamespace(name="gather"))
        await asyncio.sleep(2 * LIMIT_S)
        watchdog.close()

    with caplog.at_level(logging.WARNING, "attnd.watchdog"):
        asyncio.run(scenario())
    assert any("http-0" in text and "gather" in text for text in caplog.messages), caplog.messages
    assert slow_passes(metrics)
