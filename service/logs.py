"""Structured logs on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
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
    for name in OWN_LINES:
        logging.getLogger(name).disabled = True
    # its start and stop are told in our own words
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


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
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = (
            f"{when}.{int(record.msecs):03d} {record.levelname.lower()} "
            f"{record.name}: {record.getMessage()}"
        )
        fields: dict[str, Any] = getattr(record, "fields", {})
        for name, value in fields.items():
            line += f" {name}={value}"
        line = line.encode("ascii", "backslashreplace").decode().replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
