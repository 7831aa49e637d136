"""Records: puts and gets by a session beside copies of memory and beside plain files; lookups.

    python -m bench.records [--quick]

A service without a pool stores records of 1 MiB from an array of the session's arena, and copies
them to another array of it. Each round moves the same bytes in all ways, one after the other, so
that a busy machine slows all of them: the ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from attnd import Session
from numpy.typing import NDArray

from bench.driver.servers import attnd
from bench.report.tables import markdown

MIB: Final = 2**20
STAMP: Final = "bench"
LOOKED_UP: Final = 1000
UInt8 = NDArray[np.uint8]


@contextmanager
def session_of(*options: str) -> Iterator[Session]:
    with (
        attnd(*options, "--log.level", "warning", kind="none") as server,
        Session(server.socket, arena_bytes=512 * MIB) as session,
    ):
        yield session


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def by_session(session: Session, keys: list[bytes], given: UInt8) -> tuple[float, float]:
    """Seconds to store and to read the rows of an array of the arena."""
    stored = timed(lambda: session.put_records(keys, given, stamp=STAMP))
    found: list[Any] = []
    read = timed(lambda: found.append(session.get_records(keys, stamp=STAMP, size=MIB)))
    if set(found[0].outcomes) != {"found"}:
        raise RuntimeError(f"records are missing: {set(found[0].outcomes)}")
    return stored, read


def by_files(directory: Path, keys: list[bytes], given: UInt8, taken: UInt8) -> tuple[float, float]:
    """The same with a file for each, neither synced nor verified."""

    def write() -> None:
        for key, row in zip(keys, given, strict=True):
            with open(directory / key.hex(), "wb", buffering=0) as file:
                file.write(row.data)

    def read() -> None:
        for key, row in zip(keys, taken, strict=True):
            with open(directory / key.hex(), "rb", buffering=0) as file:
                file.readinto(row.data)

    return timed(write), timed(read)


def keys_of(count: int, begin: str) -> list[bytes]:
    return [f"{begin}-{number}".encode() for number in range(count)]


def in_host_memory(count: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of puts with gets, of copies of the same bytes, and of a lookup of many keys."""
    batch = 100
    with session_of("--cache.host-bytes", str((count + batch) * MIB)) as session:
        given = session.empty("values", (batch, MIB), np.uint8)
        given[...] = np.random.default_rng(0).integers(0, 256, given.shape, np.uint8)
        one, other = np.zeros((count, MIB), np.uint8), np.zeros((count, MIB), np.uint8)
        ours, copies, lookups = [], [], []
        for number in range(rounds):
            spent = 0.0
            for first in range(0, count, batch):
                keys = keys_of(batch, f"{number}-{first}")
                spent += sum(by_session(session, keys, given))
            ours.append(spent)
            copies.append(2 * timed(lambda: np.copyto(other, one)))
            look_up = partial(session.contains_records, keys_of(LOOKED_UP, "absent"), stamp=STAMP)
            lookups += [timed(look_up) for _ in range(20)]
    ratio = statistics.median(copy / own for copy, own in zip(copies, ours, strict=True))
    return count * 2 * MIB / statistics.median(ours), ratio, statistics.median(lookups)


def on_disk(count: int, rounds: int) -> tuple[float, float]:
    """Bytes a second of puts with gets of the disk alone, and the ratio to plain files."""
    batch = 50
    with TemporaryDirectory(prefix="attnd-bench-") as name:
        directory = Path(name)
        options = ("--cache.disk-path", f"{name}/disk", "--cache.disk-bytes", str(4 * count * MIB))
        with session_of(*options) as session:
            given = session.empty("values", (batch, MIB), np.uint8)
            given[...] = np.random.default_rng(0).integers(0, 256, given.shape, np.uint8)
            plain, taken = np.array(given), np.empty((batch, MIB), np.uint8)
            ours, files = [], []
            for number in range(rounds):
                spent = other = 0.0
                for first in range(0, count, batch):
                    keys = keys_of(batch, f"{number}-{first}")
                    spent += sum(by_session(session, keys, given))
                    other += sum(by_files(directory, keys, plain, taken))
                    for key in keys:
                        os.unlink(directory / key.hex())
                ours.append(spent)
                files.append(other)
    ratio = statistics.median(file / own for file, own in zip(files, ours, strict=True))
    return count * 2 * MIB / statistics.median(ours), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    count, rounds = (200, 3) if quick else (1000, 5)
    host, host_ratio, lookup = in_host_memory(count, rounds)
    disk, disk_ratio = on_disk(count, rounds)
    rows = [
        ["host memory, beside memcpy", f"{host / 1e9:.2f} GB/s", f"{host_ratio:.2f}"],
        ["disk, not synced, beside files", f"{disk / 1e9:.2f} GB/s", f"{disk_ratio:.2f}"],
        [f"contains of {LOOKED_UP} keys", f"{lookup * 1e3:.2f} ms", ""],
    ]
    print(markdown(["what", "put and get", "ratio"], rows))


if __name__ == "__main__":
    main()
