"""The record store: verified records of many namespaces in one directory, within a size.

Blocks are in one file; their index (`index.py`) is read once, at the start. It does not know the
meaning of a payload.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Final

from service.tiers.files import Files, read_all, write_all
from service.tiers.index import USED, Index, row_digest
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import Entry, Shelf

LOG: Final = logging.getLogger("attnd.tiers")
REMOVED_AT_ONCE: Final = 256
"""Records removed between two moments at which other threads can look others up."""
FOREIGN: Final = -1
"""Rank of records of another stamp: they give way first."""


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
        """Records that gave way to others in the write under way."""
        self.foreign: set[bytes] = set()
        """Keys of records of another stamp that were there at the start, ..."""
        self._num_foreign = 0
        """... and how many of these there are still."""
        self._shelf = Shelf(capacity_bytes // layout.block_bytes, self._gave_way)
        self._dirty: dict[int, str | None] = {}
        """Free places with data of a namespace; None: after a restart it is not known whose."""
        self._touched: dict[int, Entry] = {}
        """Records used or ranked since the index was last written."""
        self._zeros = memoryview(bytes(layout.block_bytes))
        self._opened = ExitStack()
        if not self._shelf.num_slots:
            needed = f"one record takes {layout.block_bytes}: raise it"
            raise StoreUnavailable(f"{capacity_bytes} bytes for {path} hold no record: {needed}")
        try:
            self._open()
        except OSError as error:
            self._opened.close()
            raise StoreUnavailable(f"{path} cannot be used: {error}: name another path") from error

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
        if read_all(self._files, self._data_fd, block, self._offset(entry.slot)) < len(block):
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
        """Records of this stamp."""
        with self._lock:
            return len(self._shelf) - self._num_foreign

    def is_deleted(self) -> bool:
        """Whether the file of the blocks was deleted: its bytes go as it is closed."""
        return os.fstat(self._data_fd).st_nlink == 0

    def records(self) -> list[Entry]:
        """Records of this stamp that can be read; at the start, the least recently used first."""
        with self._lock:
            return [entry for entry in self._shelf if entry.is_ready and entry.rank != FOREIGN]

    # One thread.

    def put(self, records: Sequence[NewRecord]) -> list[bool]:
        """Keep records, evicting others; returns which of them are durable now.

        A record for which there is no place is not kept. Raises `OSError`.
        """
        self.check_place()
        self._age_out(len(records))
        with self._lock:
            placed = [self._place(one) for one in records]
            removed, self._given_up = self._given_up, []
        self._index.delete(entry.slot for entry in removed)
        new = [(e, one.block) for e, one in zip(placed, records, strict=True) if e and e.holds]
        try:
            for entry, block in new:
                self._dirty.pop(entry.slot, None)
                write_all(self._files, self._data_fd, block, self._offset(entry.slot))
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
        self.check_place()
        with self._lock:
            removed = [one for one in entries if self._shelf.find(one.key) is one]
            for entry in removed:
                self._remove(entry)
        self._index.delete(entry.slot for entry in removed)

    def clear(self, namespace: str) -> int:
        """Delete a namespace's records and overwrite all their bytes with zeros.

        Returns the number of records. Raises `OSError`.
        """
        self.check_place()
        with self._lock:
            removed = list(self._shelf.own(namespace))
        for first in range(0, len(removed), REMOVED_AT_ONCE):
            with self._lock:
                for entry in removed[first : first + REMOVED_AT_ONCE]:
                    self._remove(entry)
        dirty = [slot for slot, owner in self._dirty.items() if owner in (namespace, None)]
        self._remove_others()
        try:
            self._index.clear(namespace)
        finally:  # where the index has no room on a full disk, zeros have
            errors = list(filter(None, map(self._erase, dirty)))
            if dirty:
                self._files.sync(self._data_fd)
        if errors:
            raise errors[0]
        return len(removed)

    def check_place(self) -> None:
        """Raises `OSError` where the directory is not there any more."""
        if not self._files.is_at(self._lock_fd, self.path / "lock"):
            raise OSError(errno.ENOENT, f"{self.path} was removed or replaced")

    def note(self, name: str, value: str | None) -> None:
        """Keep a short text of the caller's in the index; None deletes it. Raises `OSError`."""
        self.check_place()
        self._index.note(name, value)

    def notes(self) -> dict[str, str]:
        return self._index.notes.copy()

    def close(self) -> None:
        """Write the order of use, and let others open the directory."""
        with self._opened, suppress(OSError):
            self._insert(())

    # Start.

    def _open(self) -> None:
        files, path, size = self._files, self.path, self.layout.block_bytes
        self._directory = files.make_directory(path)
        self._opened.callback(os.close, self._directory)
        self._lock_fd = self._open_file("lock")
        try:
            files.lock(self._lock_fd)
        except BlockingIOError:
            reason = "another service uses it: name another path, or stop that service"
            raise StoreUnavailable(f"{path} cannot be used: {reason}") from None
        self._data_fd = self._open_file(f"{size}.data")
        self._others = [one for one in path.glob("*.data") if one.stem != str(size)]
        self._open_file(f"{size}.index")  # with the right mode
        self._index = Index(path / f"{size}.index")
        self._opened.callback(self._index.close)
        rows, self._index.rows = self._index.rows, []
        self._clock = rows[-1][USED] if rows else 0
        end = min(-(-os.fstat(self._data_fd).st_size // size), self._shelf.num_slots)
        beyond = [row[0] for row in rows if row[0] >= end]
        if beyond:
            self._index.delete(beyond)
            os.ftruncate(self._data_fd, end * size)
        entries = (self._entry(*row) for row in rows if row[0] < end)
        self._dirty = dict.fromkeys(self._shelf.restore(entries, end))
        if self.foreign or self._others:
            kind = "records of another model or geometry are ignored and give way to new ones"
            LOG.warning("%s: %s: name another path to keep them", path, kind)

    def _open_file(self, name: str) -> int:
        fd = self._files.open(self._directory, name)
        self._opened.callback(os.close, fd)
        return fd

    def _entry(
        self, slot: int, key: bytes, stamp: bytes, namespace: str, tag: bytes, rank: int, *_: object
    ) -> Entry:
        """A record of the index; one of another stamp has a key that no caller has."""
        if stamp == self.layout.stamp:
            return Entry(key, namespace, slot, max(0, rank), tag, is_ready=True)
        self.foreign.add(key)
        self._num_foreign += 1
        return Entry(b"\0%d" % slot, namespace, slot, FOREIGN, tag, is_ready=True)

    # Writes.

    def _place(self, record: NewRecord) -> Entry | None:
        """The record's place; one that is kept already is not held."""
        if self._shelf.has(record.key):
            return self._shelf.find(record.key)
        return self._shelf.place(record.key, record.namespace, record.rank, record.tag)

    def _offset(self, slot: int) -> int:
        return slot * self.layout.block_bytes

    def _erase(self, slot: int) -> OSError | None:
        """Overwrite a free place; why that failed. A full disk has no room for zeros where a file
        has no bytes."""
        try:
            write_all(self._files, self._data_fd, self._zeros, self._offset(slot))
        except OSError as error:
            found = bytearray(self.layout.block_bytes)
            try:
                read_all(self._files, self._data_fd, memoryview(found), self._offset(slot))
            except OSError:
                return error
            if any(found):
                return error
        del self._dirty[slot]
        return None

    def _gave_way(self, entry: Entry) -> None:
        self._given_up.append(entry)
        self._forget(entry)

    def _remove(self, entry: Entry) -> None:
        self._shelf.remove(entry)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """The record was removed; its bytes are still in its place."""
        self._touched.pop(entry.slot, None)
        self._dirty[entry.slot] = entry.namespace
        self._num_foreign -= entry.rank == FOREIGN

    def _insert(self, entries: Sequence[Entry]) -> None:
        """Write new rows, and the order of use of others."""
        with self._lock:
            touched, self._touched = self._touched, {}
        clock = count(self._clock + 1)
        used = [(next(clock), entry.rank, entry.slot) for entry in touched.values()]
        stamp = self.layout.stamp
        rows = []
        for one in entries:
            fixed = one.slot, one.key, stamp, one.namespace, one.tag
            rows.append((*fixed, one.rank, next(clock), row_digest(*fixed)))
        self._clock += len(used) + len(rows)
        if rows or used:
            self._index.write(rows, used)

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
