"""A service's records in a dict, with faults; and the settings of the adapters under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attnd.errors import NotSupported, Overloaded, TimedOut
from attnd.wire.meta import Meta

OPTIONS = {"url": "http://127.0.0.1:1", "revision": "one"}


@dataclass
class Reply:
    outcomes: tuple[str, ...]
    values: tuple[Any, ...] = ()


@dataclass
class Records:
    """Answers as a client does. `fails` is raised by each call; `calls` are their names."""

    held: dict[tuple[str, bytes], np.ndarray] = field(default_factory=dict)
    corrupt: set[bytes] = field(default_factory=set)
    leases: dict[str, set[bytes]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fails: Exception | None = None
    room: int = 2**40
    is_closed: bool = False

    def hangs(self) -> None:
        self.fails = TimedOut("no reply in 2 s")

    def is_busy(self) -> None:
        self.fails = Overloaded({"status": 429, "detail": "busy"}, Meta())

    def has_none(self) -> None:
        self.fails = NotSupported({"status": 501, "detail": "no tier"}, Meta())

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails is not None:
            raise self.fails

    def with_options(self, **_: object) -> Records:
        return self

    def outcome(self, stamp: str, key: bytes) -> str:
        if (stamp, key) in self.held:
            return "corrupt" if key in self.corrupt else "found"
        return "other_stamp" if any(one == key for _, one in self.held) else "never_stored"

    def contains_records(
        self, keys: Sequence[bytes], *, stamp: str, job: str | None = None, lease_s: float = 10
    ) -> Reply:
        self.call("contains")
        found = tuple("found" if (stamp, key) in self.held else "never_stored" for key in keys)
        if job is not None:
            hit = {key for key, one in zip(keys, found, strict=True) if one == "found"}
            self.leases.setdefault(job, set()).update(hit)
        return Reply(found)

    def put_records(self, keys: Sequence[bytes], values: Any, *, stamp: str) -> Reply:
        self.call("put")
        assert len(set(keys)) == len(keys) <= 1024
        outcomes = []
        for key, value in zip(keys, values, strict=True):
            room = self.room - sum(map(len, self.held.values()))
            outcome = "present" if (stamp, key) in self.held else "stored"
            if outcome == "stored" and len(value) > room:
                outcome = "no_room"
            if outcome == "stored":
                self.held[stamp, key] = np.array(value, copy=True)
            outcomes.append(outcome)
        return Reply(tuple(outcomes))

    def get_records(self, keys: Sequence[bytes], *, stamp: str, size: int) -> Reply:
        self.call("get")
        outcomes = tuple(self.outcome(stamp, key) for key in keys)
        pairs = zip(keys, outcomes, strict=True)
        values = tuple(self.held[stamp, key] if one == "found" else None for key, one in pairs)
        return Reply(outcomes, values)

    def delete_records(self, keys: Sequence[bytes], *, stamp: str) -> Reply:
        self.call("delete")
        found = tuple(self.outcome(stamp, key) for key in keys)
        for key in keys:
            self.held.pop((stamp, key), None)
        return Reply(found)

    def touch_records(self, keys: Sequence[bytes], *, stamp: str) -> Reply:
        self.call("touch")
        return Reply(tuple(self.outcome(stamp, key) for key in keys))

    def release_records(self, job: str) -> None:
        self.call("release")
        self.leases.pop(job, None)

    def clear_records(self) -> int:
        self.call("clear")
        self.held.clear()
        return 0

    def close(self) -> None:
        self.is_closed = True
