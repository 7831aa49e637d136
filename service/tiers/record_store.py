"""The record store: verified records of many namespaces in one directory, within a size.

Blocks are in one file; their index is a SQLite database, which is read once, at the start.
It does not know the meaning of a payload.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from service.tiers.files import Files, read_all, write_all
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import Entry, Shelf

LOG: Final = logging.getLogger("attnd.tiers")
VERSION: Final = 1
REMOVED_AT_ONCE: Final = 256
"""Records removed between two moments at which other threads can look others up."""
SCHEMA: Final = """
create table if not exists records (slot integer primary key, key blob, stamp blob,
    namespace text, rank integer, tag blob, used integer);
create table if not exists notes (name text primary key, value text);
"""


class StoreUnavailable(RuntimeError):
    """The directory cannot be used; the message is one line with the remedy."""


class RecordStore:
    """Records on disk, by key.

    `find`, `get`, `read`, `has`, `use`, `count`, `set_limit` and `records` can be called from any
    thread; the others from one thread at a time. After an `OSError` only `clear` still writes.
    `evicted` gets records that gave way to others, in the thread that wrote those.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        layout: RecordLayout,
        files: Files | None = None,
        evicted: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        """Raises `StoreUnavailable`."""
        self.layout = layout
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._files = files or Files()
        self._evicted = evicted
        self._lock = Lock()
        self._given_up: list[Entry] = []
        self.foreign: set[bytes] = set()
        """Keys of records of another stamp that were there at the start."""
        self._shelf = Shelf(capacity_bytes // layout.block_bytes, self._given_up.append)
        self._dirty: dict[int, str | None] = {}
        """Free places with data of a namespace; None: after a restart it is not known whose."""
        self._touched: dict[int, Entry] = {}
        """Records used or ranked since the index was last written."""
        self._zeros = memoryview(bytes(layout.block_bytes))
        self._lock_fd = self._data_fd = -1
        if not self._shelf.num_slots:
            needed = f"one record takes {layout.block_bytes}: raise it"
            raise StoreUnavailable(f"{capacity_bytes} bytes for {path} hold no record: {needed}")
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise StoreUnavailable(f"{path} cannot be used: {error}: name another path") from error
        except StoreUnavailable:
            self.close()
            raise

    # Any thread.

    def find(self, key: bytes) -> Entry | None:
        with self._lock:
            return self._shelf.find(key)

    def get(self, entry: Entry, block: memoryview) -> tuple[bytes, int] | None:
        """Read a record into `block` and verify it: its label, and the length of its payload.

        None where it gave way meanwhile. Raises `InvalidRecord`, `OSError`.
        """
        try:
            self.read(entry, block)
            return self.layout.check(block, entry.key, entry.namespace)
        except InvalidRecord:
            if self.has(entry):
                raise
            return None

    def read(self, entry: Entry, block: memoryview) -> None:
        """Read a record into `block`. The caller verifies it, and if it is invalid asks `has`.

        Raises `InvalidRecord` for one that is cut short, `OSError`.
        """
        offset = entry.slot * self.layout.block_bytes
        if read_all(self._files, self._data_fd, block, offset) < len(block):
            raise InvalidRecord("torn")
        self.use(entry)

    def has(self, entry: Entry) -> bool:
        """Whether a record that was found has not given way since."""
        return self.find(entry.key) is entry

    def use(self, entry: Entry, rank: int | None = None) -> None:
        """Make a record the most recently used one of `rank` (None: of its own)."""
        with self._lock:
            if self._shelf.find(entry.key) is entry:
                self._shelf.use(entry, rank)
                self._touched[entry.slot] = entry

    def set_limit(self, namespace: str, limit_bytes: int | None) -> None:
        limit = None if limit_bytes is None else limit_bytes // self.layout.block_bytes
        with self._lock:
            self._shelf.set_limit(namespace, limit)

    def count(self) -> int:
        with self._lock:
            return len(self._shelf)

    def is_deleted(self) -> bool:
        """Whether the file of the blocks was deleted: its bytes go as it is closed."""
        return os.fstat(self._data_fd).st_nlink == 0

    def records(self) -> list[Entry]:
        """Records of this stamp that can be read; at the start, the least recently used first."""
        with self._lock:
            return [entry for entry in self._shelf if entry.is_ready and entry.rank >= 0]

    # One thread.

    def put(self, records: Sequence[NewRecord]) -> list[bool]:
        """Keep records, evicting others; returns which of them are durable now.

        A record for which there is no place is not kept. Raises `OSError`.
        """
        with self._writing():
            self._age_out(len(records))
            with self._lock:
                placed = [self._place(one) for one in records]
                removed = self._take_given_up()
            self._forget(entry.slot for entry in removed)
            new = [(e, one.block) for e, one in zip(placed, records, strict=True) if e and e.holds]
            try:
                for entry, block in new:
                    self._dirty.pop(entry.slot, None)
                    offset = entry.slot * self.layout.block_bytes
                    write_all(self._files, self._data_fd, block, offset)
                if new:
                    self._files.sync(self._data_fd)
                    self._insert([entry for entry, _ in new])
            except BaseException:
                with self._lock:
                    for entry, _ in new:
                        self._remove(entry)
                raise
            with self._lock:
                for entry, _ in new:
                    entry.holds, entry.is_ready = 0, True
                # one that was kept already may have given way to another of these
                durable = [one is not None and self._shelf.find(one.key) is one for one in placed]
        for entry in removed:
            self._evicted(entry)
        return durable

    def drop(self, entries: Iterable[Entry]) -> None:
        """Delete records; their places may still have their bytes. Raises `OSError`."""
        with self._writing():
            with self._lock:
                removed = [one for one in entries if self._shelf.find(one.key) is one]
                for entry in removed:
                    self._remove(entry)
            self._forget(entry.slot for entry in removed)

    def clear(self, namespace: str) -> int:
        """Delete a namespace's records and overwrite all their bytes with zeros.

        Returns the number of records. Raises `OSError`.
        """
        with self._writing():
            with self._lock:
                removed = self._shelf.own(namespace)
            for first in range(0, len(removed), REMOVED_AT_ONCE):
                with self._lock:
                    for entry in removed[first : first + REMOVED_AT_ONCE]:
                        self._remove(entry)
            dirty = [slot for slot, owner in self._dirty.items() if owner in (namespace, None)]
            self._remove_others()
            try:
                with self._transaction(is_durable=True) as index:
                    index.execute("delete from records where namespace = ?", (namespace,))
            finally:  # where the index has no room on a full disk, zeros have
                errors = list(filter(None, map(self._erase, dirty)))
                if dirty:
                    self._files.sync(self._data_fd)
            if errors:
                raise errors[0]
            return len(removed)

    def note(self, name: str, value: str | None) -> None:
        """Keep a short text of the caller's in the index; None deletes it. Raises `OSError`."""
        with self._writing(), self._transaction(is_durable=True) as index:
            if value is None:
                index.execute("delete from notes where name = ?", (name,))
            else:
                index.execute("insert or replace into notes values (?, ?)", (name, value))

    def notes(self) -> dict[str, str]:
        return dict(self._index.execute("select name, value from notes order by name"))

    def close(self) -> None:
        """Write the order of use, and let others open the directory."""
        if (index := getattr(self, "_index", None)) is not None:
            with suppress(OSError, sqlite3.Error):
                self._insert(())
            with suppress(sqlite3.Error):
                index.close()
        for fd in (self._data_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._data_fd = -1

    # Start.

    def _open(self) -> None:
        files, path, size = self._files, self.path, self.layout.block_bytes
        files.make_directory(path)
        self._lock_fd = files.open(path / "lock")
        try:
            files.lock(self._lock_fd)
        except BlockingIOError:
            reason = "another service uses it: name another path, or stop that service"
            raise StoreUnavailable(f"{path} cannot be used: {reason}") from None
        self._data_fd = files.open(path / f"{size}.data")
        self._others = [one for one in path.glob("*.data") if one.stem != str(size)]
        try:
            entries = self._read_index()
        except sqlite3.DatabaseError as error:
            LOG.warning("the index of %s is damaged (%s): its records are ignored", path, error)
            self._index.close()
            for one in path.glob(f"{size}.index*"):
                one.unlink()
            entries = self._read_index()
        end = min(-(-os.fstat(self._data_fd).st_size // size), self._shelf.num_slots)
        beyond = [entry.slot for entry in entries if entry.slot >= end]
        if beyond:
            self._forget(beyond)
            os.ftruncate(self._data_fd, end * size)
        free = self._shelf.restore([one for one in entries if one.slot < end], end)
        self._dirty = dict.fromkeys(free)
        if self.foreign or self._others:
            kind = "records of another model or geometry are ignored and give way to new ones"
            LOG.warning("%s: %s: name another path to keep them", path, kind)

    def _read_index(self) -> list[Entry]:
        """Open the index; its records, least recently used first."""
        path = self.path / f"{self.layout.block_bytes}.index"
        os.close(self._files.open(path))  # with the right mode
        index = self._index = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        index.executescript(
            f"pragma journal_mode = wal; pragma secure_delete = on; {SCHEMA}"
            f"pragma user_version = {VERSION};"
        )
        rows = index.execute(
            "select slot, key, stamp, namespace, rank, tag, used from records order by used"
        ).fetchall()
        self._clock = rows[-1][-1] if rows else 0
        self.foreign = {key for _, key, stamp, *_ in rows if stamp != self.layout.stamp}
        return [
            Entry(
                key if stamp == self.layout.stamp else b"\0%d" % slot,
                namespace,
                slot,
                rank if stamp == self.layout.stamp else -1,
                tag,
                is_ready=True,
            )
            for slot, key, stamp, namespace, rank, tag, _ in rows
        ]

    # Writes.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Check that the directory is still there; every failure is an `OSError`."""
        if not self._files.is_at(self._lock_fd, self.path / "lock"):
            raise OSError(errno.ENOENT, f"{self.path} was removed or replaced")
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"the index of {self.path}: {error}") from error

    @contextmanager
    def _transaction(self, is_durable: bool) -> Iterator[sqlite3.Connection]:
        index = self._index
        index.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
        index.execute("begin")
        try:
            yield index
            index.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):
                index.execute("rollback")
            raise

    def _place(self, record: NewRecord) -> Entry | None:
        """The record's place; one that is kept already is not held."""
        found = self._shelf.find(record.key)
        if found is not None or self._shelf.has(record.key):
            return found
        return self._shelf.place(record.key, record.namespace, record.rank, record.tag)

    def _erase(self, slot: int) -> OSError | None:
        """Overwrite a free place; why that failed. A full disk has no room for zeros where a file
        has no bytes."""
        offset, found = slot * self.layout.block_bytes, bytearray(self.layout.block_bytes)
        try:
            write_all(self._files, self._data_fd, self._zeros, offset)
        except OSError as error:
            try:
                read_all(self._files, self._data_fd, memoryview(found), offset)
            except OSError:
                return error
            if any(found):
                return error
        del self._dirty[slot]
        return None

    def _take_given_up(self) -> list[Entry]:
        removed = self._given_up.copy()
        self._given_up.clear()
        for entry in removed:
            self._touched.pop(entry.slot, None)
            self._dirty[entry.slot] = entry.namespace
        return removed

    def _remove(self, entry: Entry) -> None:
        self._shelf.remove(entry)
        self._touched.pop(entry.slot, None)
        self._dirty[entry.slot] = entry.namespace

    def _forget(self, slots: Iterable[int]) -> None:
        """Delete rows of the index, durably before their places are written to: else they would be
        there again after a loss of power, with the bytes of others."""
        rows = [(slot,) for slot in slots]
        if rows:
            with self._transaction(is_durable=True) as index:
                index.executemany("delete from records where slot = ?", rows)

    def _insert(self, entries: Sequence[Entry]) -> None:
        """Write new rows, and the order of use of others."""
        with self._lock:
            touched, self._touched = self._touched, {}
        used = []
        for entry in touched.values():
            self._clock += 1
            used.append((self._clock, entry.rank, entry.slot))
        rows = []
        for entry in entries:
            self._clock += 1
            row = (entry.slot, entry.key, self.layout.stamp, entry.namespace, entry.rank)
            rows.append((*row, entry.tag, self._clock))
        if rows or used:
            with self._transaction(is_durable=bool(rows)) as index:
                index.executemany("update records set used = ?, rank = ? where slot = ?", used)
                index.executemany("insert or replace into records values (?,?,?,?,?,?,?)", rows)

    def _age_out(self, count: int) -> None:
        """Remove files of other geometries once their room is needed."""
        if self._others:
            own = (len(self._shelf) + count) * self.layout.block_bytes
            if own + sum(one.stat().st_size for one in self._others) > self.capacity_bytes:
                self._remove_others()

    def _remove_others(self) -> None:
        for data in self._others:
            for one in (data, *self.path.glob(f"{data.stem}.index*")):
                one.unlink(missing_ok=True)
        self._others = []
