"""`AttndL2Adapter`: LMCache's objects as records of attnd."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Generic, TypeVar

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from attnd.engines.options import StoreOptions, stamp_of
from attnd.engines.store import EngineStore, Part
from attnd.engines.workers import Kind, Workers

T = TypeVar("T")
STORED: Final = ("stored", "present")


class Results(Generic[T]):
    """Results of tasks, each taken once, and the eventfd that LMCache polls for them."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()

    def add(self, task: int, result: T) -> None:
        with self._lock:
            self._results[task] = result
        os.eventfd_write(self.fd, 1)

    def take(self, task: int) -> T | None:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        with self._lock:
            taken, self._results = self._results, {}
        return taken


class Locks:
    """Leases of lookups. A lookup's lease ends when each of its keys is unlocked."""

    def __init__(self) -> None:
        self._jobs_by_key: dict[Any, deque[str]] = {}
        self._locked_by_job: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, job: str, keys: Sequence[Any]) -> None:
        with self._lock:
            for key in keys:
                self._jobs_by_key.setdefault(key, deque()).append(job)
            self._locked_by_job[job] += len(keys)

    def remove(self, keys: Sequence[Any]) -> list[str]:
        """The jobs that hold no key any more. Keys that are not locked are ignored."""
        ended = []
        with self._lock:
            for key in keys:
                if not (jobs := self._jobs_by_key.get(key)):
                    continue
                job = jobs.popleft()
                if not jobs:
                    del self._jobs_by_key[key]
                self._locked_by_job[job] -= 1
                if not self._locked_by_job[job]:
                    del self._locked_by_job[job]
                    ended.append(job)
        return ended

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._jobs_by_key.values()))


class AttndL2Adapter(L2AdapterInterface):
    """Stores, looks up and loads in threads of its own; a service that is away is a miss.

    `params` are those of `StoreOptions`; `revision` must be given, because LMCache's keys name the
    model and not its weights. The key has the model, the rank, the group and the salt; the stamp
    the revision and LMCache's version; and each record begins with the digest of its object's
    shapes, dtypes and format, so that other bytes are a miss. Raises ValueError.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        options = StoreOptions.read(params)
        if not options.revision:
            raise ValueError(
                "revision is missing: LMCache's keys do not say which weights made a block; give "
                '"revision", such as the commit of the model\'s repository'
            )
        facts = {"revision": options.revision, "lmcache": version("lmcache")}
        self._store = EngineStore(options, stamp_of("lmcache", options.revision, facts))
        self._store.check()
        self._workers = Workers(options.threads)
        self._stores: Results[L2StoreResult] = Results()
        self._lookups: Results[Bitmap] = Results()
        self._loads: Results[Bitmap] = Results()
        self._locks = Locks()
        self._name = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._sizes: dict[Any, int] = {}

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Successful where attnd has every object afterwards."""

        def store() -> L2StoreResult:
            outcomes = self._store.put([*map(record_key, keys)], [*map(parts_of, objects)])
            sizes = [int(one.get_size()) for one in objects]
            new = [at for at, outcome in enumerate(outcomes) if outcome == "stored"]
            self._remember([keys[at] for at in new], [sizes[at] for at in new])
            return L2StoreResult(
                all(one in STORED for one in outcomes), sum(sizes[at] for at in new)
            )

        return self._submit("store", store, self._stores, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> int:
        """Objects found are held for `lease_s` seconds, or until they are unlocked."""
        task = self._next_task()
        job = f"lmcache-{self._name}-{task}"

        def look_up() -> Bitmap:
            hits = self._store.contains([*map(record_key, keys)], job)
            self._locks.add(job, [key for key, hit in zip(keys, hits, strict=True) if hit])
            self._forget([key for key, hit in zip(keys, hits, strict=True) if not hit])
            return bitmap_of(hits)

        return self._submit("lookup", look_up, self._lookups, Bitmap(len(keys)), task)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """A release that is lost is made good by the end of the lease."""
        for job in self._locks.remove(keys):
            self._workers.submit("store", partial(self._store.release, job), lambda _: None)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Writes to no object after the task's result."""

        def load() -> Bitmap:
            hits = self._store.get([*map(record_key, keys)], [*map(parts_of, objects)])
            if found := [key for key, hit in zip(keys, hits, strict=True) if hit]:
                self._notify_keys_accessed(found)
            self._forget([key for key, hit in zip(keys, hits, strict=True) if not hit])
            return bitmap_of(hits)

        return self._submit("load", load, self._loads, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, as LMCache's quotas ask for."""
        self._store.delete([*map(record_key, keys)])
        self._forget(keys)

    def close(self) -> None:
        """Tasks that have not begun fail; those that have are waited for."""
        self._workers.close()
        self._store.close()
        for results in (self._stores, self._lookups, self._loads):
            os.close(results.fd)

    def report_status(self) -> dict[str, Any]:
        """Healthy where the latest call was answered; with the outcomes of keys by operation."""
        outage = self._store.outage
        return {
            "is_healthy": not outage.holds,
            "type": type(self).__name__,
            "url": self._store.options.url,
            "outage": outage.reason,
            "locked_key_count": len(self._locks),
            **self._store.counts,
        }

    def _next_task(self) -> int:
        with self._lock:
            self._num_tasks += 1
            return self._num_tasks

    def _submit(
        self,
        kind: Kind,
        job: Callable[[], T],
        results: Results[T],
        failed: T,
        task: int | None = None,
    ) -> int:
        """Run a task; its result is `failed` where it raised or was cancelled."""
        number = self._next_task() if task is None else task
        self._workers.submit(
            kind, job, lambda result: results.add(number, failed if result is None else result)
        )
        return number

    def _remember(self, keys: list[Any], sizes: list[int]) -> None:
        """Count new objects."""
        with self._lock:
            self._sizes.update(zip(keys, sizes, strict=True))
        if keys:
            self._notify_keys_stored(keys, sizes)

    def _forget(self, keys: Sequence[Any]) -> None:
        """Uncount objects that attnd has no more."""
        with self._lock:
            gone = [
                (key, self._sizes.pop(key)) for key in dict.fromkeys(keys) if key in self._sizes
            ]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


def record_key(key: Any) -> bytes:
    """The digest of an object's key, of which every part says where it ends."""
    parts = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def parts_of(memory: Any) -> list[Part]:
    """An object's record: the digest of its layout, then its bytes."""
    metadata = memory.metadata
    layout = repr((metadata.shape, metadata.dtype, metadata.shapes, metadata.dtypes, metadata.fmt))
    seal = hashlib.blake2b(layout.encode(), digest_size=32).digest()
    return [seal, np.frombuffer(memory.byte_array, np.uint8)]


def bitmap_of(hits: Sequence[bool]) -> Bitmap:
    bits = Bitmap(len(hits))
    for at, hit in enumerate(hits):
        if hit:
            bits.set(at)
    return bits
