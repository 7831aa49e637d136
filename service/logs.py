"""Structured logs on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from config.sections import LogSettings

OWN_LINES: Final = ("uvicorn.access",)
"""Silenced: every request has its own line already."""

PLAIN: Final = re.compile(r'[^\s"=\\\x00-\x1f\x7f-\U0010ffff]+')
"""Values of fields that need no quotes: another field cannot begin in them."""


def set_up_logs(settings: LogSettings, process: str) -> None:
    """Send everything of this process, named `process` in every line, through one handler."""
    lines = JsonLines(process) if settings.format == "json" else ConsoleLines(process)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.captureWarnings(True)
    forget_origins()
    for name in OWN_LINES:
        logging.getLogger(name).disabled = True
    # its start and stop are told in our own words
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def forget_origins() -> None:
    """Records without file, line, thread and process, which no line shows: half of their cost."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


@lru_cache(maxsize=2)
def clock(second: int) -> str:
    return datetime.fromtimestamp(second).strftime("%H:%M:%S")


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "process": ..., "logger": ..., "message": ..., <fields>}`;
    always ASCII. A record with `each`, a list of fields, is a line for each."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        end = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return "\n".join([json.dumps(line | each | end, default=str) for each in told_of(record)])


class ConsoleLines(logging.Formatter):
    """`12:00:00.123 info http-0 attnd.access: request id=... op=decode status=200`; lines as in
    `JsonLines`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{clock(int(record.created))}.{int(record.msecs):03d} {record.levelname.lower()} "
            f"{self._process} {record.name}: {record.getMessage()}"
        )
        if not line.isprintable():  # escape codes for terminals, say
            line = line.encode("unicode_escape").decode("ascii")
        lines = [
            line + "".join([f" {name}={shown(value)}" for name, value in fields.items()])
            for fields in told_of(record)
        ]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


def told_of(record: logging.LogRecord) -> list[dict[str, Any]]:
    """The fields of each of a record's lines."""
    each: list[dict[str, Any]] | None = getattr(record, "each", None)
    return [getattr(record, "fields", {})] if each is None else each


def shown(value: object) -> str:
    """A field's value, as a JSON string where it could be taken for more than one word."""
    text = str(value)
    return text if type(value) is int or PLAIN.fullmatch(text) else json.dumps(text)
