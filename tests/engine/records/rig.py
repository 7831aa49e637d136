"""Engines without a pool, whose records a session reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from attnd import Session

from config.sections import BackendSettings, CacheSettings
from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from kernels.no_pool import NoPool
from service.engine.records.pool import RecordPool
from tests.engine.harness import Running, running_engine, write_keys
from tests.tiers.faulty_files import FaultyFiles

STAMP = "org/model@1 fp16 NHD tp1/1"
MIB = 2**20


@dataclass
class Rig:
    """A running engine, a session with it, and the files of its disk."""

    running: Running
    session: Session
    files: FaultyFiles

    @property
    def pool(self) -> RecordPool:
        found = self.running.engine.store.records
        assert found is not None
        return found

    def by(self, key: str) -> Session:
        """A session of the caller with this key."""
        return Session(self.running.path, api_key=key, arena_bytes=MIB, timeout=30.0)

    def metric(self, line: str) -> float:
        text = self.running.metrics.render()[0].decode()
        (found,) = [one for one in text.splitlines() if one.startswith(line)]
        return float(found.split()[-1])


@contextmanager
def records(
    directory: Path | None = None,
    *,
    host_bytes: int = 32 * MIB,
    disk_bytes: int = 64 * MIB,
    keys: Mapping[str, tuple[str, list[str]]] | None = None,
    files: FaultyFiles | None = None,
    **engine: Any,
) -> Iterator[Rig]:
    """An engine with records in host memory, and in files of a `directory`."""
    files = files or FaultyFiles()
    cache = CacheSettings(host_bytes=host_bytes)
    if directory is not None:
        cache = CacheSettings(
            host_bytes=host_bytes, disk_path=str(directory / "disk"), disk_bytes=disk_bytes
        )
    auth = AuthSettings()
    if keys is not None:
        assert directory is not None
        write_keys(str(directory / "keys"), keys)
        auth = AuthSettings(keys_file=str(directory / "keys"))
    settings = Settings(
        backend=BackendSettings(kind="none"),
        cache=cache,
        auth=auth,
        server=ServerSettings(),
        engine=EngineSettings(**engine),
    )
    key = next(iter(keys), None) if keys else None
    with running_engine(NoPool(), settings) as running:
        store = running.engine.store.records
        if store is not None and store.disk.store is not None:
            store.disk.store._files = files
        with Session(running.path, api_key=key, timeout=30.0) as session:
            yield Rig(running, session, files)


def values_of(rng: np.random.Generator, count: int, most: int = 200_000) -> list[bytes]:
    """Random records of many sizes, the extremes of a place among them."""
    sizes = [1, 65_535, 65_536, 65_537, *rng.integers(1, most, count).tolist()][:count]
    return [rng.bytes(size) for size in sizes]


def keys_of(count: int, begin: str = "k") -> list[bytes]:
    return [f"{begin}-{number}".encode() for number in range(count)]


def read(session: Session, keys: list[bytes], stamp: str = STAMP) -> dict[bytes, bytes | str]:
    """The bytes of each key, or the reason why there are none."""
    found = session.get_records(keys, stamp=stamp)
    every = zip(keys, found.outcomes, found.values, strict=True)
    return {key: how if value is None else value.tobytes() for key, how, value in every}
