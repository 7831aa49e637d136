"""The index of a record store: rows and notes in a SQLite database, which is read at the start.

Each has a digest, so that a flipped bit costs one of them and nothing more.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_digest

LOG: Final = logging.getLogger("attnd.tiers")
SCHEMA: Final = """
create table if not exists records (slot integer primary key, key blob, stamp blob,
    namespace text, tag blob, rank integer, used integer, digest blob);
create table if not exists notes (name text primary key, value text, digest blob);
"""
ROWS: Final = (
    "select slot, key, stamp, namespace, tag, cast(rank as integer), cast(used as integer), digest"
    " from records"
)
INSERT: Final = "insert or replace into records values (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE: Final = "delete from records where slot = ?"
FAILED: Final = (sqlite3.Error, UnicodeDecodeError)
"""The latter for a message about a damaged text."""
DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Errors of an index that cannot be read again; after others, such as a full disk, it can."""


Row = tuple[int, bytes, bytes, str, bytes, int, int, bytes]
"""Slot, key, stamp, namespace and tag of a record; its rank, a number that grows with each use, and
the digest of what does not change."""
USED: Final = 6


class Index:
    """Belongs to one thread at a time. Its changes raise `OSError`."""

    def __init__(self, path: Path, read: bool = True) -> None:
        """Open the index, or an empty one in place of a damaged one; `read` its rows and notes.

        Raises `OSError`.
        """
        self.path = path
        self.rows: list[Row] = []
        """Of the start, the least recently used first."""
        self.notes: dict[str, str] = {}
        with self._errors():
            self._connect()
            try:
                self._read(read)
            except FAILED as error:
                self.close()
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in DAMAGED:
                    raise
                LOG.warning("%s is damaged (%s): its records are ignored", path, error)
                for one in path.parent.glob(f"{path.name}-*"):
                    one.unlink()
                os.truncate(path, 0)  # with its mode
                self.rows.clear()
                self._connect()
                self._read(read)

    def _connect(self) -> None:
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.text_factory = lambda text: text.decode(errors="replace")

    def _read(self, is_wanted: bool) -> None:
        self._db.executescript(f"pragma journal_mode = wal; pragma secure_delete = on; {SCHEMA}")
        if not is_wanted:
            return
        damaged: list[int] = []
        for row in self._db.execute(ROWS):
            try:
                is_intact = row[7] == row_digest(*row[:5])
            except (TypeError, AttributeError, OverflowError):
                is_intact = False
            if is_intact:
                self.rows.append(row)
            else:
                damaged.append(row[0])
        self.rows.sort(key=itemgetter(USED))
        notes = self._db.execute("select name, value, digest from notes").fetchall()
        self.notes = {name: text for name, text, known in notes if known == note_digest(name, text)}
        if count := len(damaged) + len(notes) - len(self.notes):
            LOG.warning("%d entries of %s are damaged: they are ignored", count, self.path)
        self._db.executemany(DELETE, [(slot,) for slot in damaged])

    def write(
        self,
        rows: Sequence[Row] = (),
        used: Iterable[tuple[int, int, int]] = (),
        notes: Mapping[str, str | None] | None = None,
        *,
        is_durable: bool = True,
    ) -> None:
        """Write new rows and `notes` (None deletes one), durably by default, and `used`, `rank` of
        the rows of some slots."""
        notes = notes or {}
        kept = {name: value for name, value in notes.items() if value is not None}
        with self._transaction(is_durable and bool(rows or notes)):
            self._db.executemany("update records set used = ?, rank = ? where slot = ?", used)
            self._db.executemany(INSERT, rows)
            self._db.executemany("delete from notes where name = ?", [(name,) for name in notes])
            texts = [(name, value, note_digest(name, value)) for name, value in kept.items()]
            self._db.executemany("insert into notes values (?, ?, ?)", texts)
        for name in notes:
            self.notes.pop(name, None)
        self.notes |= kept

    def delete(self, slots: Iterable[int], *, is_durable: bool = True) -> None:
        """Delete rows, by default durably before their places are written to: else they would be
        there again after a loss of power, with the bytes of others."""
        if rows := [(slot,) for slot in slots]:
            with self._transaction(is_durable):
                self._db.executemany(DELETE, rows)

    def sync(self) -> None:
        """Make all that was written durable."""
        with self._errors():
            self._db.execute("pragma synchronous = full")
            self._db.execute("pragma wal_checkpoint(full)")

    def slots(self, namespace: str | None = None) -> list[int]:
        """Slots of the rows of a namespace, or of all (None)."""
        which, values = ("", ()) if namespace is None else (" where namespace = ?", (namespace,))
        with self._errors():
            return [
                slot for (slot,) in self._db.execute(f"select slot from records{which}", values)
            ]

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    @contextmanager
    def _transaction(self, is_durable: bool = True) -> Iterator[None]:
        with self._errors():
            self._db.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
            self._db.execute("begin")
            try:
                yield
                self._db.execute("commit")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("rollback")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FAILED as error:
            raise OSError(errno.EIO, f"the index {self.path}: {error}") from error


def row_digest(slot: int, key: bytes, stamp: bytes, namespace: str, tag: bytes) -> bytes:
    """Of what does not change. Can raise TypeError, AttributeError, OverflowError for a damaged
    row."""
    return xxh3_64_digest(slot.to_bytes(8, "little") + key + stamp + tag + namespace.encode())


def note_digest(name: str, value: str) -> bytes:
    return xxh3_64_digest(f"{name}\n{value}".encode())
