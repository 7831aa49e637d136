"""Records for an engine's cache: blocking calls, in batches, whose failures are misses."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attnd.engines.options import StoreOptions
from attnd.errors import AttndError, NotSupported, Overloaded
from attnd.public import Client, Session
from attnd.session import socket_path

Part = NDArray[np.uint8] | bytes
"""A piece of a record: memory of the engine, or bytes that a record must have in this place."""
Connected = Client | Session

LOG: Final = logging.getLogger("attnd.engines")
MAX_KEYS: Final = 1024
MAX_BATCH_BYTES: Final = 32 * 2**20
"""Of the records in one call, which may have one larger record all the same."""
MAX_RECORD_BYTES: Final = 64 * 2**20
RETRIES: Final = 1
"""For a connection that a restart of the service broke; a call without a reply has none."""
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
FOUND: Final = "found"
UNREACHABLE: Final = "unreachable"
FOREIGN: Final = "foreign"


def connect(options: StoreOptions) -> Connected:
    """A session where the service's engine has a socket on this host, else HTTP."""
    try:
        path = socket_path(options.url)
    except ValueError:
        path = ""
    timeout, key = options.deadline_s, options.key() or None
    if path and (path == options.url or os.path.exists(path)):
        return Session(options.url, api_key=key, timeout=timeout, retries=RETRIES)
    return Client(options.url, api_key=key, timeout=timeout, retries=RETRIES)


@dataclass(slots=True)
class Outage:
    """Calls fail at once until `ends`: one hanging service costs one deadline, not one a call."""

    pause_s: float = 0.0
    ends: float = 0.0
    reason: str = ""

    def begin(self, reason: str) -> None:
        self.pause_s = min(MAX_PAUSE_S, self.pause_s * 2) or FIRST_PAUSE_S
        self.ends = time.monotonic() + self.pause_s
        self.reason = reason

    @property
    def holds(self) -> bool:
        return time.monotonic() < self.ends


@dataclass(slots=True)
class EngineStore:
    """Records of one stamp. Threads may share it; no method raises for what a service does.

    `counts` has the outcomes of keys by operation: `get found`, `get corrupt`, `put no_room`, …;
    `unreachable` where the service did not answer in time, `foreign` where bytes were not those
    that the engine expects.
    """

    options: StoreOptions
    stamp: str
    counts: Counter[str] = field(default_factory=Counter)
    outage: Outage = field(default_factory=Outage)
    _connected: Connected | None = None
    _is_usable: bool = True
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, record_bytes: int = 0) -> None:
        """Raises ValueError where the service has no records, or none as large as `record_bytes`.

        A service that does not answer is no error: its records are misses until it does.
        """
        if record_bytes > MAX_RECORD_BYTES:
            raise ValueError(
                f"a block of the engine has {record_bytes} bytes, and a record at most "
                f"{MAX_RECORD_BYTES}: let the engine make smaller blocks"
            )
        try:
            self._client().release_records("check")
        except NotSupported as error:
            raise ValueError(f"{self.options.url} has no records: {error.detail}") from error
        except (AttndError, OSError) as error:
            self._failed(error)

    def contains(self, keys: Sequence[bytes], job: str | None = None) -> list[bool]:
        """Whether each key has a record; with `job`, records found are held until its release."""
        hits: list[bool] = []
        for some in parts(keys):
            outcomes = self._lookup(some, job)
            if outcomes is None and job is not None and not self.outage.holds:
                outcomes = self._lookup(some, None)  # more than may be held
            hits += [one == FOUND for one in outcomes or [""] * len(some)]
        return hits

    def _lookup(self, keys: Sequence[bytes], job: str | None) -> Sequence[str] | None:
        def look_up(to: Connected) -> Any:
            if job is None:
                return to.contains_records(keys, stamp=self.stamp)
            lease_s = self.options.lease_s
            return to.contains_records(keys, stamp=self.stamp, job=job, lease_s=lease_s)

        reply = self._attempt("contains", len(keys), look_up)
        return None if reply is None else list(reply.outcomes)

    def put(self, keys: Sequence[bytes], records: Sequence[Sequence[Part]]) -> list[str]:
        """Store records; returns the outcome of each: "stored", "present", or why it is not."""
        outcomes = [UNREACHABLE] * len(keys)
        for batch, size in batches(keys, records):
            names = [keys[at] for at in batch]

            def put(
                to: Connected, batch: range = batch, size: int = size, names: list[bytes] = names
            ) -> Any:
                rows = buffer(to, len(batch), size)
                for row, at in zip(rows, batch, strict=True):
                    gather(records[at], row)
                return to.put_records(names, rows, stamp=self.stamp)

            if (reply := self._attempt("put", len(batch), put)) is not None:
                outcomes[batch.start : batch.stop] = reply.outcomes
        return outcomes

    def get(self, keys: Sequence[bytes], records: Sequence[Sequence[Part]]) -> list[bool]:
        """Copy records into the engine's memory; returns which were found.

        Memory of a key that is not found is as it was. All copies have ended at the return.
        """
        hits = [False] * len(keys)
        for batch, size in batches(keys, records):
            names = [keys[at] for at in batch]
            reply = self._attempt("get", len(batch), partial(read, names, self.stamp, size))
            for at, value in zip(batch, () if reply is None else reply.values, strict=False):
                if value is not None:
                    hits[at] = scatter(value, records[at])
                    if not hits[at]:  # it would be kept, and missed, at each later put
                        self.count("get", [FOREIGN])
                        self.delete([keys[at]])
        return hits

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete records; those that are not there are no error."""
        for some in parts(keys):
            self._attempt("delete", len(some), partial(delete, some, self.stamp))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count records as used now."""
        for some in parts(keys):
            self._attempt("touch", len(some), partial(touch, some, self.stamp))

    def clear(self) -> None:
        """Erase all records of the key's namespace."""
        self._attempt("clear", 0, lambda to: to.clear_records())

    def release(self, job: str) -> None:
        """End the lease of a job. A lease that is not ended passes by itself."""
        self._attempt("release", 0, lambda to: to.release_records(job))

    def close(self) -> None:
        """Close the connection. Calls after it are misses."""
        with self._lock:
            self._is_closed = True
            if self._connected is not None:
                self._connected.close()

    def snapshot(self) -> Counter[str]:
        """A copy of `counts`."""
        with self._lock:
            return self.counts.copy()

    def count(self, operation: str, outcomes: Sequence[str]) -> None:
        """Add the outcomes of some keys to `counts`."""
        with self._lock:
            self.counts.update(f"{operation} {one}" for one in outcomes)

    def _attempt(self, name: str, num_keys: int, call: Callable[[Connected], Any]) -> Any:
        """The reply of one call; None where there is none in time, or the service refuses it."""
        if self._is_closed or self.outage.holds:
            self.count(name, [UNREACHABLE] * num_keys)
            return None
        try:
            reply = call(self._client())
        except Overloaded:
            self.count(name, ["overloaded"] * num_keys)
            return None
        except (AttndError, OSError, RuntimeError) as error:
            self._failed(error)
            self.count(name, [UNREACHABLE] * num_keys)
            return None
        self._answered()
        if num_keys:
            self.count(name, reply.outcomes)
        return reply

    def _client(self) -> Connected:
        """The connection; over HTTP only until the engine has a socket on this host."""
        with self._lock:
            if self._connected is None or not self._is_usable:
                previous, self._connected = self._connected, connect(self.options)
                self._is_usable = True
                if previous is not None:
                    previous.close()
            return self._connected

    def _answered(self) -> None:
        if self.outage.pause_s:
            LOG.warning("attnd at %s answers again", self.options.url)
            self.outage = Outage()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self.outage.pause_s:
                LOG.warning(
                    "attnd at %s: %s; its records are misses until it answers",
                    self.options.url,
                    error,
                )
            if not self.outage.holds:
                self.outage.begin(f"{type(error).__name__}: {error}")
            self._is_usable = False


def delete(keys: Sequence[bytes], stamp: str, to: Connected) -> Any:
    return to.delete_records(keys, stamp=stamp)


def touch(keys: Sequence[bytes], stamp: str, to: Connected) -> Any:
    return to.touch_records(keys, stamp=stamp)


def read(keys: Sequence[bytes], stamp: str, size: int, to: Connected) -> Any:
    return to.get_records(keys, stamp=stamp, size=size)


def parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The keys of one call each."""
    for at in range(0, len(keys), MAX_KEYS):
        yield keys[at : at + MAX_KEYS]


def batches(
    keys: Sequence[bytes], records: Sequence[Sequence[Part]]
) -> Iterator[tuple[range, int]]:
    """Ranges of records for one call each, with the size of these: equal sizes, no key twice."""
    start, seen = 0, set[bytes]()
    sizes = [sum(map(len, parts)) for parts in records]
    for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        num = at - start
        fits = num < MAX_KEYS and (num + 1) * size <= MAX_BATCH_BYTES
        if num and (size != sizes[start] or key in seen or not fits):
            yield range(start, at), sizes[start]
            start, seen = at, set()
        seen.add(key)
    if keys:
        yield range(start, len(keys)), sizes[start]


def buffer(to: Connected, num: int, size: int) -> NDArray[np.uint8]:
    """Rows for `num` records: in a session's arena, whose service reads them in place."""
    if isinstance(to, Session):
        return to.empty("values", (num, size), np.uint8)
    return np.empty((num, size), np.uint8)


def gather(parts: Sequence[Part], row: NDArray[np.uint8]) -> None:
    """Copy the pieces of a record one after another."""
    at = 0
    for part in parts:
        row[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)


def scatter(value: NDArray[np.uint8], parts: Sequence[Part]) -> bool:
    """Copy a record to its pieces; False, and nothing is copied, where it is not as expected."""
    if len(value) != sum(map(len, parts)):
        return False
    places, at = list[tuple[NDArray[np.uint8], int]](), 0
    for part in parts:
        if isinstance(part, bytes):
            if value[at : at + len(part)].tobytes() != part:
                return False
        else:
            places.append((part, at))
        at += len(part)
    for part, at in places:
        part[:] = value[at : at + len(part)]
    return True
