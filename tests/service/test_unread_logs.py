"""A log without a reader: the process continues, lines are dropped and counted."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import pytest

from service.logs import MAX_WAITING, BackgroundHandler, ConsoleLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def record(number: int) -> logging.LogRecord:
    return logging.LogRecord(
        "attnd.test", logging.INFO, "", 0, f"line {number} {'x' * 200}", None, None
    )


def test_a_log_without_a_reader_delays_nothing_and_reports_dropped_lines_later(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    handler = BackgroundHandler(writing)
    handler.setFormatter(ConsoleLines("engine"))
    counted: list[int] = []
    handler.on_dropped = counted.append
    count = MAX_WAITING + 3000
    started = time.monotonic()
    for number in range(count):
        handler.emit(record(number))
    assert time.monotonic() - started < 5.0, "nothing waited for a reader"
    assert counted and counted == sorted(counted)
    text, written = b"", []
    while len(written) + counted[-1] < count or b"were dropped" not in text:
        text += os.read(reading, 2**16)
        lines = text.decode().splitlines()
        written = [line for line in lines if "attnd.test: line " in line]
    reply = [int(line.split()[4]) for line in lines if "log lines were dropped" in line]
    assert sum(reply) == counted[-1]
    assert [int(line.split()[5]) for line in written[:5]] == [0, 1, 2, 3, 4], "in order"


def test_logged_lines_are_written_before_a_process_ends(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = BackgroundHandler(writing)
    handler.setFormatter(ConsoleLines("engine"))
    for number in range(10):
        handler.emit(record(number))
    handler.flush()
    assert os.read(reading, 2**16).count(b"\n") == 10
