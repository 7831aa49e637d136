"""The record store: verified records of many namespaces in one directory, within a size.

Blocks are in one file; their index (`index.py`) is read once, at the start. It does not know the
meaning of a payload.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count, islice
from pathlib import Path
from threading import Lock
from typing import Final

from service.tiers.files import Files, read_all, write_all
from service.tiers.index import USED, Index, row_digest
from service.tiers.other_records import DELETED_AT_ONCE, ERASED_AT_ONCE, OtherRecords
from service.tiers.records import InvalidRecord, NewRecord, RecordLayout
from service.tiers.shelf import Entry, Shelf, stretches_of

LOG: Final = logging.getLogger("attnd.tiers")
COUNT: Final = struct.Struct("<I")
"""Further places of a record, before their numbers."""
FOREIGN: Final = -1
"""Rank of records of another stamp: they give way first."""


class StoreUnavailable(RuntimeError):
    """The directory cannot be used; the message is one line with the remedy."""


class RecordStore:
    """Records on disk, by key.

    `put` and what follows it are for one thread at a time, all before it for any. After an
    `OSError` only `clear` still writes. `evicted` gets records that gave way to others, in the
    thread that wrote those.
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
        self._deleted: dict[int, tuple[int, ...]] = {}
        """First places of records whose rows the index still has, and the places that become free
        once it has not."""
        self.is_synced = True
        """Whether all that was written survives a loss of power."""
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
        self.read_part(block, self._offset(entry.slot))
        self.use(entry)

    def read_part(self, into: memoryview, offset: int) -> None:
        """Read bytes of the file. Raises `InvalidRecord` where it is too short, `OSError`."""
        if read_all(self._files, self._data_fd, into, offset) < len(into):
            raise InvalidRecord("torn")

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

    def count(self, namespace: str | None = None) -> int:
        """Records of a namespace, or of all (None), of this stamp."""
        with self._lock:
            if namespace is not None:
                return self._shelf.count(namespace)
            return len(self._shelf) - self._num_foreign

    def drop(self, entries: Iterable[Entry]) -> None:
        """Delete records: they are not found any more. A later `put` deletes their rows; until then
        a restart finds them again. Their places keep their bytes until others overwrite them."""
        with self._lock:
            for entry in entries:
                if self._shelf.find(entry.key) is entry:
                    self._shelf.take_out(entry)
                    self._forget(entry)
                    self._deleted[entry.slot] = entry.slots

    @property
    def namespaces(self) -> list[str]:
        """Namespaces with records."""
        with self._lock:
            return self._shelf.namespaces

    @property
    def num_places(self) -> int:
        return self._shelf.num_slots

    @property
    def has_deleted(self) -> bool:
        """Whether the index has rows of dropped records."""
        return bool(self._deleted)

    def pinned(self) -> list[Entry]:
        """Records that are not evicted."""
        with self._lock:
            return self._shelf.pinned()

    def is_deleted(self) -> bool:
        """Whether the file of the blocks was deleted: its bytes go as it is closed."""
        return os.fstat(self._data_fd).st_nlink == 0

    def records(self, namespace: str | None = None) -> list[Entry]:
        """Records of this stamp that can be read, of a namespace or of all (None); at the start,
        the least recently used first."""
        with self._lock:
            among = self._shelf if namespace is None else self._shelf.own(namespace)
            return [entry for entry in among if entry.is_ready and entry.rank != FOREIGN]

    # One thread.

    def put(
        self,
        records: Sequence[NewRecord],
        notes: Mapping[str, str | None] | None = None,
        *,
        syncs: bool = True,
    ) -> list[bool]:
        """Keep records, evicting others; returns which of them are there now, durably with `syncs`.
        Also keep short texts of the caller's (None deletes one), and delete some rows of dropped
        records.

        A record for which there is no place is not kept. Raises `OSError`.
        """
        self.check_place()
        places = sum(one.size for one in records)
        self._age_out(places)
        if self._deleted and (not records or self._shelf.num_free < places):
            self._delete_rows(self._some_deleted(), syncs)
        with self._lock:
            placed = [self._place(one) for one in records]
            removed, self._given_up = self._given_up, []
            self._deleted |= dict.fromkeys((entry.slot for entry in removed), ())
        new = [(e, one) for e, one in zip(placed, records, strict=True) if e and e.holds]
        try:
            if removed:
                gone = [entry.slot for entry in removed]
                self._delete_rows([*gone, *self._some_deleted()], syncs)
            for entry, record in new:
                self._write(entry, record.parts)
            is_late = syncs and not self.is_synced
            if syncs and (new or is_late):
                self._files.sync(self._data_fd)
            self.is_synced &= not new
            if new or notes:
                self._insert([entry for entry, _ in new], notes, syncs)
            elif is_late:
                self._index.sync()
            self.is_synced |= syncs
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

    def clear(self, namespace: str) -> Generator[None, None, int]:
        """Delete a namespace's records and overwrite all their bytes with zeros, a piece a step.
        Records that are put between two steps stay.

        Returns the number of records. Raises `OSError`, after it has erased what it can.
        """
        self.check_place()
        with self._lock:
            own = list(self._shelf.own(namespace))
        errors: list[OSError] = []
        earlier = list(self._deleted)
        for first in range(0, max(len(own), len(earlier)), DELETED_AT_ONCE):
            part = slice(first, first + DELETED_AT_ONCE)
            self.drop(own[part])
            try:
                if not errors:  # where the index has no room on a full disk, zeros have
                    self._delete_rows([*earlier[part], *(entry.slot for entry in own[part])])
            except OSError as error:
                errors.append(error)
            yield
        known = list(self._dirty.items())
        dirty = [slot for slot, owner in known if owner in (namespace, None)]
        at_once = max(1, ERASED_AT_ONCE // self.layout.block_bytes)
        for first in range(0, len(dirty), at_once):
            errors += filter(None, map(self._erase, dirty[first : first + at_once]))
            self._files.sync(self._data_fd)
            yield
        for others in self._others:
            yield from others.clear(namespace)
        if errors:
            raise errors[0]
        return len(own)

    def check_place(self) -> None:
        """Raises `OSError` where the directory is not there any more."""
        if not self._files.is_at(self._lock_fd, self.path / "lock"):
            raise OSError(errno.ENOENT, f"{self.path} was removed or replaced")

    def notes(self) -> dict[str, str]:
        return self._index.notes.copy()

    def close(self) -> None:
        """Write the order of use, delete rows, and let others open the directory."""
        with self._opened, suppress(OSError):
            while self._deleted:
                self._delete_rows(self._some_deleted())
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
        self._others = [
            OtherRecords(self._directory, one, files)
            for one in path.glob("*.data")
            if one.stem.isdecimal() and one.stem != str(size)
        ]
        self._open_file(f"{size}.index")  # with the right mode
        self._index = Index(path / f"{size}.index")
        self._opened.callback(self._index.close)
        rows, self._index.rows = self._index.rows, []
        self._clock = rows[-1][USED] if rows else 0
        end = min(-(-os.fstat(self._data_fd).st_size // size), self._shelf.num_slots)
        entries = [self._entry(*row) for row in rows]
        beyond = [entry for entry in entries if max(entry.slots) >= end]
        if beyond:
            self._index.delete([entry.slot for entry in beyond])
            self._num_foreign -= sum(entry.rank == FOREIGN for entry in beyond)
            os.ftruncate(self._data_fd, end * size)
            entries = [entry for entry in entries if max(entry.slots) < end]
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
            more: tuple[int, ...] = ()
            if self.layout.spans:
                (num,) = COUNT.unpack_from(tag)
                more = struct.unpack_from(f"<{num}I", tag, COUNT.size)
                tag = tag[COUNT.size + 4 * num :]
            return Entry(key, namespace, slot, max(0, rank), tag, is_ready=True, more=more)
        self.foreign.add(key)
        self._num_foreign += 1
        return Entry(b"\0%d" % slot, namespace, slot, FOREIGN, tag, is_ready=True)

    # Writes.

    def _packed(self, entry: Entry) -> bytes:
        """A record's tag as the index has it: behind its further places, where it can have some."""
        if not self.layout.spans:
            return entry.tag
        num = len(entry.more)
        return struct.pack(f"<{1 + num}I", num, *entry.more) + entry.tag

    def _place(self, record: NewRecord) -> Entry | None:
        """The record's place; one that is kept already is not held."""
        if self._shelf.has(record.key):
            return self._shelf.find(record.key)
        return self._shelf.place(record.key, record.namespace, record.rank, record.tag, record.size)

    def _some_deleted(self) -> list[int]:
        with self._lock:
            return list(islice(self._deleted, DELETED_AT_ONCE))

    def _delete_rows(self, slots: Sequence[int], syncs: bool = True) -> None:
        """Delete rows of dropped records, durably with `syncs`; then their places are free."""
        self._index.delete(slots, is_durable=syncs)
        with self._lock:
            for slot in slots:
                self._shelf.free(self._deleted.pop(slot, ()))

    def _write(self, entry: Entry, parts: Sequence[memoryview]) -> None:
        """Write a record to its places, with zeros to the end of the last one."""
        size, left = self.layout.block_bytes, entry.slots
        for slot in left:
            self._dirty.pop(slot, None)
        for part in parts:
            num_places = -(-len(part) // size)
            done = 0
            for first, num in stretches_of(left[:num_places]):
                piece = part[done : done + num * size]
                write_all(self._files, self._data_fd, piece, first * size)
                done += num * size
            if done > len(part):
                tail, end = done - len(part), (left[num_places - 1] + 1) * size
                write_all(self._files, self._data_fd, self._zeros[:tail], end - tail)
            left = left[num_places:]

    def _offset(self, slot: int) -> int:
        return slot * self.layout.block_bytes

    def _erase(self, slot: int) -> OSError | None:
        """Overwrite a place without a record; why that failed. A full disk has no room for zeros
        where a file has no bytes."""
        if slot not in self._dirty:
            return None  # a record was put there meanwhile
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
        for slot in entry.slots:
            self._dirty[slot] = entry.namespace
        self._num_foreign -= entry.rank == FOREIGN

    def _insert(
        self,
        entries: Sequence[Entry],
        notes: Mapping[str, str | None] | None = None,
        syncs: bool = True,
    ) -> None:
        """Write new rows, the order of use of others, and notes."""
        with self._lock:
            touched, self._touched = self._touched, {}
        clock = count(self._clock + 1)
        used = [(next(clock), entry.rank, entry.slot) for entry in touched.values()]
        stamp = self.layout.stamp
        rows = []
        for one in entries:
            fixed = one.slot, one.key, stamp, one.namespace, self._packed(one)
            rows.append((*fixed, one.rank, next(clock), row_digest(*fixed)))
        self._clock += len(used) + len(rows)
        if rows or used or notes:
            self._index.write(rows, used, notes, is_durable=syncs)
        with self._lock:
            for one in entries:  # a row of an earlier record was replaced
                self._deleted.pop(one.slot, None)

    def _age_out(self, count: int) -> None:
        """Remove files of other geometries once their room is needed."""
        if self._others:
            own = (len(self._shelf) + count) * self.layout.block_bytes
            if own + sum(one.num_bytes for one in self._others) > self.capacity_bytes:
                for one in self._others:
                    one.remove()
                self._others = []
