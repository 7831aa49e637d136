"""Structured logs on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from config.sections import LogSettings

OWN_LINES: Final = ("uvicorn.access",)
"""Silenced: every request has its own line already."""

MAX_WAITING: Final = 8192
MAX_CHARS: Final = 4 * 2**20
"""Lines, and their characters, that wait for a reader of standard error."""
FLUSH_S: Final = 1.0
"""How long the end of a process waits for its last lines to be written."""
PLAIN: Final = re.compile(r'[^\s"=\\\x00-\x1f\x7f-\U0010ffff]+')
"""Values of fields that need no quotes: another field cannot begin in them."""


class BackgroundHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own, in order.

    The reader of the log may stop reading, and a loop must not wait for that: `MAX_WAITING` lines
    and `MAX_CHARS` characters wait, further lines are dropped, as are lines for which a disk has no
    room. A line says how many, once lines can be written again, and `on_dropped` is called with the
    number since the process began.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._waiting: deque[str] = deque()
        self._chars = 0
        self._dropped = self._reported = 0
        self._changed = threading.Condition()
        self._is_writing = False
        self.on_dropped: Callable[[int], object] = lambda _: None
        threading.Thread(target=self._write, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Has the thread write a record; returns at once."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) >= MAX_WAITING or self._chars + len(text) > MAX_CHARS:
                self._drop(1 + text.count("\n"))
            else:
                self._waiting.append(text)
                self._chars += len(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all lines are written, or for `FLUSH_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._is_writing), FLUSH_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                self._is_writing = True
                lines = list(self._waiting)
                self._waiting.clear()
                self._chars = 0
            if lost := self._put("\n".join(lines) + "\n"):
                with self._changed:
                    self._drop(lost)
                continue
            dropped = self._dropped
            unreported = dropped - self._reported
            if unreported and not self._put(self._format_dropped(unreported) + "\n"):
                self._reported = dropped

    def _drop(self, count: int) -> None:
        self._dropped += count
        self.on_dropped(self._dropped)

    def _put(self, text: str) -> int:
        """Writes text, however long that takes. A full disk or a broken pipe loses it: returns the
        number of lines that are not written whole."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            return bytes(data).count(b"\n")
        return 0

    def _format_dropped(self, count: int) -> str:
        text = (
            f"{count} log lines were dropped: standard error was not read fast enough, "
            "or could not be written"
        )
        record = logging.LogRecord("attnd.log", logging.WARNING, "", 0, text, None, None)
        return self.format(record)


def count_dropped(count: Callable[[int], object]) -> None:
    """Have `count` called with the number of lines dropped since the process began, as it grows."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, BackgroundHandler):
            handler.on_dropped = count


def set_up_logs(settings: LogSettings, process: str) -> None:
    """Send everything of this process, named `process` in every line, through one handler."""
    lines = JsonLines(process) if settings.format == "json" else ConsoleLines(process)
    handler = BackgroundHandler(2 if sys.stderr is None else sys.stderr.fileno())
    handler.setFormatter(lines)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.captureWarnings(True)
    # records without file, line, thread and process, which no line shows: half of their cost
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in OWN_LINES:
        logging.getLogger(name).disabled = True
    # its start and stop are logged in our own words
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def log_beside_others(settings: LogSettings) -> None:
    """Send the service's lines where its caller's process sends its own, or else, where that has
    set up no logs, to standard error as `set_up_logs` does."""
    own = logging.getLogger("attnd")
    own.setLevel(settings.level.upper())
    if not logging.getLogger().handlers and not own.handlers:
        handler = BackgroundHandler(2 if sys.stderr is None else sys.stderr.fileno())
        own.addHandler(handler)
    for one in own.handlers:
        if isinstance(one, BackgroundHandler):
            one.setFormatter((JsonLines if settings.format == "json" else ConsoleLines)("engine"))


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
        return "\n".join([json.dumps(line | each | end, default=str) for each in fields_of(record)])


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
            for fields in fields_of(record)
        ]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


def fields_of(record: logging.LogRecord) -> list[dict[str, Any]]:
    each: list[dict[str, Any]] | None = getattr(record, "each", None)
    return [getattr(record, "fields", {})] if each is None else each


def shown(value: object) -> str:
    """A field's value, as a JSON string where it could be taken for more than one word."""
    text = str(value)
    return text if type(value) is int or PLAIN.fullmatch(text) else json.dumps(text)
