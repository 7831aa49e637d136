"""The tiers of an engine in a world: threads that run in virtual time, copies that are late."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import apsw
import numpy as np

from config.sections import CacheSettings
from kernels.backend import EndOfCopies, Int32, PagePlaces
from kernels.digests import host_digests
from service.engine.loop.engine import Engine
from service.engine.tiers import copier, disk, fetcher, setup
from service.engine.tiers.page_records import layout_of
from service.tiers import index
from service.tiers.files import Files
from service.tiers.record_store import RecordStore, StoreUnavailable
from service.tiers.worker import Ticket, Worker, raising
from tests.world.network import NEVER, Fault, Replaced

if TYPE_CHECKING:
    from tests.world.device import WorldDevice
    from tests.world.simulation import Simulation

Write = tuple[int, bytes, int]  # where, the bytes there before, and the file's size before
ROOMY: Final = 1000  # records: no run has as many pages
LATE_S: Final = (0.0, 1e-5, 1e-4, 1e-3, 0.02)
MEMORY: Final = "/dev/shm" if os.path.isdir("/dev/shm") else None
LOSSES: Final = {
    *("disk is full", "disk flips a bit", "disk lies about a sync"),
    *("disk fails to read", "disk fails to sync", "disk dies"),
}
FAULTS: Final = (0.0, 0.03, 0.3)  # of the shares in the world of a disk: one turns the tier off


class SimFiles(Files):
    """Real files below a cache that is lost with the power; SQLite's as well."""

    def __init__(self, order: random.Random, fault: Fault) -> None:
        self.order, self.fault = order, fault
        self.is_dead = False
        """Whether every call fails, for as long as its process lives."""
        self.unsynced: dict[str, list[Write]] = {}  # by file, since its last sync
        self.vfs = IndexFiles(self)

    def patches(self) -> list[Replaced]:
        connecting = SimpleNamespace(**vars(sqlite3) | {"connect": partial(Connection, self)})
        return [(index, "sqlite3", connecting)]

    def open_store(self, *given: Any, **named: Any) -> RecordStore:
        """A store, of a process that is started again until the disk lets it."""
        while True:
            self.is_dead = False
            with suppress(StoreUnavailable):
                return RecordStore(*given, files=self, **named)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        size = len(into)
        if self.fault("disk reads short", 0.05):
            size = self.order.randint(1, size)
        self.check_read()
        count = super().read(fd, into[:size], offset)
        if count and self.fault("disk flips a bit", 0.02):
            into[self.order.randrange(count)] ^= 1 << self.order.randrange(8)
        return count

    def check_alive(self) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "the disk is dead")

    def check_read(self) -> None:
        self.check_alive()
        if self.fault("disk fails to read", 0.01):
            raise OSError(errno.EIO, "a fault of the disk")

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.check_room()
        if self.fault("disk writes short", 0.05):
            data = data[: self.order.randint(1, len(data))]
        self.note(fd_path(fd), offset, len(data))
        return super().write(fd, data, offset)

    def check_room(self) -> None:
        self.check_alive()
        if self.fault("disk is full", 0.02):
            raise OSError(errno.ENOSPC, "the disk is full")

    def sync(self, fd: int) -> None:
        self.synced(fd_path(fd))

    def synced(self, path: str) -> None:
        self.check_alive()
        if self.fault("disk fails to sync", 0.01):
            raise OSError(errno.EIO, "a fault of the disk")
        if not self.fault("disk lies about a sync", 0.01):
            self.unsynced.pop(path, None)

    def note(self, path: str, offset: int, length: int) -> None:
        """Remember what is there before a write, or before the file is cut at `offset`."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            old = os.pread(file.fileno(), length, offset)
        self.unsynced.setdefault(path, []).append((offset, old, size))

    def lose_power(self) -> None:
        """Writes since the last syncs are lost, or torn, in any order."""
        for path, writes in self.unsynced.items():
            if not os.path.exists(path):
                continue
            with open(path, "r+b") as file:
                for offset, old, size in reversed(writes):
                    kept = self.order.choice((0, len(old), self.order.randint(0, len(old))))
                    os.pwrite(file.fileno(), old[kept:], offset + kept)
                    if not kept:
                        file.truncate(size)
        self.unsynced = {}


def fd_path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class IndexFiles(apsw.VFS):  # type: ignore[misc]
    """SQLite's layer of files. It has no shared memory: connections lock their file for good."""

    def __init__(self, files: SimFiles) -> None:
        self.files, self.name = files, f"world-{id(self)}"
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> IndexFile:
        return IndexFile(self.files, name, flags)


class IndexFile(apsw.VFSFile):  # type: ignore[misc]
    def __init__(self, files: SimFiles, name: Any, flags: list[int]) -> None:
        self.files = files
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        self._do(self.files.check_read)
        return bytes(super().xRead(amount, offset))

    def xWrite(self, data: bytes, offset: int) -> None:
        self._do(self.files.check_room)
        self.files.note(self.path, offset, len(data))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self.files.note(self.path, size, 2**30)
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._do(partial(self.files.synced, self.path))
        super().xSync(flags)

    @staticmethod
    def _do(work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            raise (apsw.FullError if is_full else apsw.IOError)(str(error)) from None


class Connection:
    """`sqlite3.Connection`, as far as the index uses it, over these files."""

    def __init__(self, files: SimFiles, path: Path, **_: Any) -> None:
        self.text_factory: Any = None
        self._db = self._do(lambda: apsw.Connection(str(path), vfs=files.vfs.name))
        self.executescript("pragma locking_mode = exclusive")

    def execute(self, sql: str, values: Any = ()) -> Rows:
        return Rows(self._do(lambda: list(self._db.execute(sql, values))))

    executescript = execute

    def executemany(self, sql: str, rows: Any) -> None:
        self._do(lambda: self._db.executemany(sql, list(rows)))

    def close(self) -> None:
        self._do(lambda: self._db.close(True))

    @staticmethod
    def _do(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except apsw.Error as error:
            found = sqlite3.OperationalError(str(error))
            of_files = {apsw.FullError: sqlite3.SQLITE_FULL, apsw.IOError: sqlite3.SQLITE_IOERR}
            found.sqlite_errorcode = of_files.get(type(error)) or error.result
            raise found from error


class Rows(list[Any]):
    def fetchall(self) -> list[Any]:
        return self


class SimWorker(Worker):
    """Runs its tasks without a thread, each some time after the one before it: at the latest when
    its engine looks for ends then."""

    def __init__(
        self,
        world: Simulation,
        name: str,
        most: int,
        wake: Callable[[], None],
        threads: int = 1,
        fatal: type[Exception] | tuple[()] = (),
    ) -> None:
        self.world, self.dues = world, deque[tuple[float, Ticket]]()
        self._most, self._wake, self._fatal = most * threads, wake, fatal
        self._tickets, self._free_at = deque[Ticket](), 0.0
        engine: Any = wake.__self__  # type: ignore[attr-defined]
        engine._selector.workers.append(self)

    def add(self, task: Any, is_ready: Callable[[], bool] | None = None) -> None:
        ticket, world = Ticket(task, is_ready), self.world
        self._tickets.append(ticket)
        if is_ready is None:
            late = world.order.random() * world.order.choice(LATE_S)
            self._free_at = max(self._free_at, world.clock.now) + late
            self.dues.append((self._free_at, ticket))

    def next_due(self) -> float:
        return self.dues[0][0] if self.dues else NEVER

    def advance(self, until: float) -> None:
        """Run the tasks that are due."""
        while self.dues and self.dues[0][0] <= until:
            self._run_one(self.dues.popleft()[1])
            self._wake()

    def take_done(self, most: int | None = None) -> bool:
        self.advance(self.world.clock.now)
        return super().take_done(most)

    def close(self, timeout_s: float) -> bool:
        self.advance(NEVER)
        for ticket in self._tickets:
            if ticket.is_ready is not None:
                self._run_one(ticket)
        return True

    def _run_one(self, ticket: Ticket) -> None:
        try:
            ticket.end = ticket.task()
        except self._fatal as error:
            ticket.end = raising(error)
        except Exception as error:
            self.world.fail(error)
            ticket.end = lambda: None


class SimCopies:
    """Copies of pages beside a device's stream: each reads or writes the pool at its end."""

    def __init__(self, device: WorldDevice) -> None:
        self.device, self.order = device, copy(device.order)
        self.calls, self.prepared = self.order.choice((1, 2)), self.order.random() < 0.5

    def is_prepared(self, _: PagePlaces) -> bool:
        return self.prepared

    def prepare(self, _: PagePlaces) -> None:
        self.prepared = True

    def memory(self, count: int, size: int) -> Any:
        return np.zeros((count, size), np.uint8)

    def mark(self) -> float:
        """When all kernels launched so far have run."""
        return self.device.stream[-1].due if self.device.stream else 0.0

    def read(self, pages: Int32, to: PagePlaces, after: object) -> EndOfCopies:
        return self._begin(pages.copy(), to, after, is_load=False)

    def write(self, pages: Int32, source: PagePlaces, after: object) -> EndOfCopies:
        return self._begin(pages.copy(), source, after, is_load=True)

    def _begin(self, pages: Int32, places: PagePlaces, after: Any, is_load: bool) -> EndOfCopies:
        device, order = self.device, self.order
        late = order.random() * order.choice(LATE_S)
        due = max(after, device.clock.now) + late

        def has_come() -> bool:
            return bool(device.clock.now >= due)

        wait = partial(self._copy, pages, places, after, is_load)
        return EndOfCopies(wait, has_come if order.random() < 0.5 else None)

    def _copy(self, pages: Int32, places: PagePlaces, after: float, is_load: bool) -> list[bytes]:
        device, g = self.device, self.device.geometry
        device.check()
        device.run(after)
        shape = g.num_layers, 2, g.page_size, g.num_kv_heads, g.head_dim
        for page, row in zip(pages.tolist(), places.rows.tolist(), strict=True):
            block = places.blocks[row, places.skip : places.skip + g.payload_bytes]
            stored = block.view(np.float32).reshape(shape)
            rows = device.pool[:, :, page * g.page_size : (page + 1) * g.page_size]
            np.copyto(*((rows, stored) if is_load else (stored, rows)))
        return host_digests(places, g)


class TierPlan:
    """Which tiers the engine of a run has, and the directory that outlives its processes."""

    def __init__(self, world: Simulation) -> None:
        order = random.Random(f"{world.plan.seed} tiers")
        self.world, self.block_bytes = world, layout_of(world.geometry, "world").block_bytes
        some = ((0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (1, 1)) if world.has_tiers else ((0, 0),)
        self.has_host, self.has_disk = order.choice(some)
        self.host_bytes = self.has_host * order.choice((4, 16, 64)) * self.block_bytes
        self.num_records = order.choice((12, 60, 4096, 4096))
        self.writes_commits = bool(self.has_disk) and order.random() < 0.6
        self.faults = order.choice(FAULTS)
        self.files = SimFiles(order, lambda name, share: world.fault(name, share * self.faults))
        self.folder = tempfile.TemporaryDirectory(prefix="attnd-world-", dir=MEMORY)
        self.path = Path(self.folder.name) / "0"

    @property
    def has_any(self) -> bool:
        return bool(self.has_host or self.has_disk)

    @property
    def is_roomy(self) -> bool:
        """Whether no record has to give way to others."""
        return self.num_records > ROOMY

    @property
    def is_honest(self) -> bool:
        """Whether no fault can have cost a record or a note."""
        return LOSSES.isdisjoint(self.world.faults)

    def settings(self, cache: CacheSettings) -> CacheSettings:
        new: dict[str, Any] = {"host_bytes": self.host_bytes}
        if self.has_disk:
            new |= {"disk_path": str(self.path), "model": "world"}
            new |= {"disk_bytes": self.num_records * self.block_bytes}
            new |= {"write": "commit" if self.writes_commits else "evict"}
        return cache.model_copy(update=new)

    def patches(self) -> list[Replaced]:
        worker = partial(SimWorker, self.world)
        machine = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=2**40))
        return [
            *((module, "Worker", worker) for module in (copier, disk, fetcher)),
            (setup, "RecordStore", self.files.open_store),
            *self.files.patches(),
            (setup, "shutil", machine),
            (setup, "free_bytes", lambda _: 2**40),
            (Engine, "_wake", lambda engine: engine._selector.wake()),
        ]

    def end(self, engine: Engine, how: str) -> None:
        """An engine's process dies: the next one finds what is on the disk."""
        loading = engine.store.loading
        if loading is None or (store := self._store_of(loading)) is None:
            engine.store.loading = None
            return
        if how == "power loss":
            self.files.lose_power()
        there = self.path.with_name("1")
        shutil.copytree(self.path, there)
        engine.store.loading = None
        store.close()
        shutil.rmtree(self.path)
        there.rename(self.path)
        self.files.unsynced = {}

    @staticmethod
    def _store_of(loading: Any) -> RecordStore | None:
        found: RecordStore | None = loading.tiers.disk.store or loading.tiers.disk._failed
        return found
