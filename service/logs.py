"""Structured logs on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from config.settings import LogSettings

OWN_LINES: Final = ("uvicorn.access",)
"""Silenced: every request has its own line already."""


def set_up_logs(settings: LogSettings) -> None:
    """Send everything of the process through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.format == "json" else ConsoleLines())
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
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., <fields>}`; always ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told.update(getattr(record, "fields", {}))
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class ConsoleLines(logging.Formatter):
    """`12:00:00.123 info attnd.access: request id=... op=decode status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{clock(int(record.created))}.{int(record.msecs):03d} {record.levelname.lower()} "
            f"{record.name}: {record.getMessage()}"
        )
        fields: dict[str, Any] = getattr(record, "fields", {})
        line += "".join([f" {name}={value}" for name, value in fields.items()])
        if not line.isprintable():  # a path may hold anything, escape codes for terminals too
            line = line.encode("unicode_escape").decode("ascii")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
