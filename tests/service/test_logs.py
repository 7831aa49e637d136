"""Log lines: one JSON object or one printable line each, whatever is logged."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from service.logs import ConsoleLines, JsonLines

ROOT = Path(__file__).resolve().parents[2]
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
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
