"""Leases: records that jobs hold are not evicted."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from service.engine.store.ledger import Kind, Ledger
from service.engine.tiers.disk import Disk
from service.tiers.shelf import Entry, Shelf

LEASED_SHARE: Final = 0.5
"""Share of the places on disk, or without one in host memory, that leases can hold."""


class PoolOfLeases(Protocol):
    """The leases' part in the pool."""

    ledger: Ledger
    host: Shelf
    disk: Disk

    def use(self, one: bytes) -> None: ...
    def find(self, one: bytes) -> tuple[Entry, object] | None: ...


@dataclass(slots=True, eq=False)
class RecordLease:
    """The records of a job, with the places that they take, until `ends`."""

    ends: float
    held: dict[bytes, int] = field(default_factory=dict)


class RecordLeases:
    """Belongs to the engine's thread. The places that a namespace holds are counted."""

    def __init__(self, pool: PoolOfLeases) -> None:
        self._pool = pool
        self._jobs: dict[tuple[str, str], RecordLease] = {}
        self._holds: Counter[bytes] = Counter()
        """Jobs that hold a record."""
        self._next_end = math.inf

    def has(self, namespace: str, job: str) -> bool:
        """Whether a job holds records."""
        return (namespace, job) in self._jobs

    def count(self, namespace: str | None) -> int:
        """Jobs of a namespace, or of all (None), that hold records."""
        return sum(namespace in (None, owner) for owner, _ in self._jobs)

    def hold(self, namespace: str, job: str, ids: Iterable[bytes], lease_s: float) -> None:
        """Hold records for a job, beside those that it holds.

        Raises Overloaded where they exceed the namespace's share; then nothing is held.
        """
        lease = self._jobs.get((namespace, job)) or RecordLease(0.0)
        new = {one: size for one in ids if one not in lease.held and (size := self._size_of(one))}
        self._pool.ledger.refuse(self._kind, namespace, sum(new.values()))
        self._pool.ledger.add(self._kind, namespace, sum(new.values()))
        self._jobs[namespace, job] = lease
        lease.held |= new
        lease.ends = time.monotonic() + lease_s
        self._next_end = min(self._next_end, lease.ends)
        self._holds.update(new.keys())
        self._pool.disk.pinned |= new.keys()
        for one in new:
            self._pool.use(one)

    def release(self, namespace: str, job: str) -> None:
        """End the lease of a job, if it has one."""
        lease = self._jobs.pop((namespace, job), None)
        if lease is None:
            return
        self._pool.ledger.add(self._kind, namespace, -sum(lease.held.values()))
        for one in lease.held:
            self._holds[one] -= 1
            if not self._holds[one]:
                del self._holds[one]
                self._pool.disk.pinned.discard(one)
                self._pool.use(one)

    def clear(self, namespace: str) -> None:
        """End all leases of a namespace."""
        for owner, job in [name for name in self._jobs if name[0] == namespace]:
            self.release(owner, job)

    def expire(self) -> None:
        """End leases whose time is over."""
        if (now := time.monotonic()) < self._next_end:
            return
        for namespace, job in [name for name, one in self._jobs.items() if one.ends <= now]:
            self.release(namespace, job)
        self._next_end = min((one.ends for one in self._jobs.values()), default=math.inf)

    @property
    def _kind(self) -> Kind:
        store = self._pool.disk.store
        places = self._pool.host.num_slots if store is None else store.num_places
        most = max(1, int(LEASED_SHARE * places))
        return Kind("places of records held by jobs", most, "release jobs, or let them end")

    def _size_of(self, one: bytes) -> int:
        found = self._pool.find(one)
        return 0 if found is None else len(found[0].slots)
