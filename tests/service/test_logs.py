"""Log lines: one JSON object or one printable line each, whatever is logged; without a reader
the process continues, and lines are dropped and counted."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator

import pytest

from service.logs import MAX_WAITING, BackgroundHandler, ConsoleLines, JsonLines
from tests.harness.processes import run

PROGRAM = """
import logging, sys
from config.settings import LogSettings
from service.logs import set_up_logs
set_up_logs(LogSettings(format=sys.argv[1], level=sys.argv[2]), "http-0")
log = logging.getLogger("attnd.test")
log.debug("quiet")
log.info("logged %s", "once", extra={"fields": {"id": "a\\nb\\x1b", "n": 3}})
try:
    raise ValueError("why\\ud800")
except ValueError:
    log.exception("failed")
logging.getLogger("uvicorn.access").info("twice")
logging.getLogger("uvicorn.error").info("started")
"""


def lines(*arguments: str) -> list[str]:
    """The output of a process with these log settings (the set-up is for a whole process)."""
    done = run(sys.executable, "-c", PROGRAM, *arguments, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_are_objects_with_the_fields_beside() -> None:
    entry, failed = map(json.loads, lines("json", "info"))
    assert (entry["level"], entry["logger"], entry["message"]) == (
        "info",
        "attnd.test",
        "logged once",
    )
    assert entry["process"] == "http-0"
    assert (entry["id"], entry["n"]) == ("a\nb\x1b", 3)
    assert entry["time"].endswith("+00:00")
    assert failed["level"] == "error" and "ValueError" in failed["exception"]


def test_console_lines_stay_on_their_line() -> None:
    first, second, *traceback = lines("console", "info")
    assert first.endswith('info http-0 attnd.test: logged once id="a\\nb\\u001b" n=3')
    assert second.endswith("error http-0 attnd.test: failed")
    assert traceback[0].startswith("Traceback") and "ValueError" in traceback[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/v1/decode", "/v1/decode"),
        ("10.0.0.1:5000", "10.0.0.1:5000"),
        (0.25, "0.25"),
        (None, "None"),
        ("", '""'),
        ("/ status=200", '"/ status=200"'),
        ("/\u00a0status=200", '"/\\u00a0status=200"'),
        ("a=b", '"a=b"'),
        ('a" b="c', '"a\\" b=\\"c"'),
        ('"quoted"', '"\\"quoted\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("\u202e", '"\\u202e"'),
    ],
)
def test_a_fields_value_cannot_pass_for_another_field(value: object, shown: str) -> None:
    record = logging.makeLogRecord({"msg": "request", "fields": {"path": value, "status": 404}})
    assert ConsoleLines("http-0").format(record).endswith(f": request path={shown} status=404")


def test_a_record_of_several_is_a_line_for_each() -> None:
    each = [{"id": "a", "status": 200}, {"id": "b", "status": 404}]
    record = logging.makeLogRecord({"msg": "request", "each": each, "created": 0.0})
    first, second = ConsoleLines("http-0").format(record).splitlines()
    assert first.endswith(": request id=a status=200") and second.endswith("id=b status=404")
    entry = [json.loads(line) for line in JsonLines("http-0").format(record).splitlines()]
    assert [(one["message"], one["id"]) for one in entry] == [("request", "a"), ("request", "b")]


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("error", 1)])
def test_the_level_is_the_least_that_is_written(level: str, count: int) -> None:
    assert len(lines("json", level)) == count
    assert logging.getLogger("attnd.test").level == logging.NOTSET


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


def test_lines_that_a_full_disk_does_not_take_are_counted_and_reported_once_it_has_room(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    full = os.open("/dev/full", os.O_WRONLY)
    handler = BackgroundHandler(full)
    handler.setFormatter(ConsoleLines("engine"))
    counted: list[int] = []
    handler.on_dropped = counted.append
    for number in range(5):
        handler.emit(record(number))
        handler.flush()
    assert counted == [1, 2, 3, 4, 5]
    os.dup2(writing, full)
    handler.emit(record(5))
    handler.flush()
    text = os.read(reading, 2**16).decode()
    os.close(full)
    assert "attnd.test: line 5" in text and "5 log lines were dropped" in text


def test_logged_lines_are_written_before_a_process_ends(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = BackgroundHandler(writing)
    handler.setFormatter(ConsoleLines("engine"))
    for number in range(10):
        handler.emit(record(number))
    handler.flush()
    assert os.read(reading, 2**16).count(b"\n") == 10
