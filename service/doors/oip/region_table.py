"""Which regions clients have registered: one table in shared memory, for all doors of a service.

The first word counts the changes. The table itself, JSON behind its length, lies in one of two
places, at each change in the other one, and the count is written last: a door that is killed on the
way leaves the table as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Final

from service.image.json_text import dump_json

WORD: Final = 8
PLACES: Final = (2**12, 2**32)
"""Where the table lies after an even and an odd number of changes; memory is taken as it is used.
"""


@dataclass(frozen=True, slots=True)
class Region:
    """`size` bytes, from `offset`, of the shared memory object that the client calls `key`."""

    key: str
    offset: int
    size: int


Regions = Mapping[str, Region]
"""Those of a namespace, by name."""


def make_table() -> int:
    """A file descriptor of an empty table, to be handed to the doors. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError("server.client_shm: shared memory of clients is served on Linux only")
    return os.memfd_create("attnd-regions", os.MFD_CLOEXEC)


class RegionTable:
    """The table as one door has it."""

    def __init__(self, fd: int) -> None:
        # opened anew: locks are between open files, and an inherited one is the same for all
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._count = 0
        self._known: dict[str, dict[str, Region]] = {}

    def of(self, namespace: str) -> Regions:
        """What a namespace has registered by now."""
        if self._word(0) != self._count:
            with self._locked(fcntl.LOCK_SH):
                self._read()
        return self._known.get(namespace, {})

    @contextmanager
    def changing(self, namespace: str) -> Iterator[dict[str, Region]]:
        """A namespace's regions, to be changed in place while no other door does; nothing is
        changed where that raises."""
        with self._locked(fcntl.LOCK_EX):
            self._read()
            regions = dict(self._known.get(namespace, {}))
            yield regions
            known = {**self._known, namespace: regions}
            self._write({name: held for name, held in known.items() if held})

    def close(self) -> None:
        os.close(self._fd)

    def _word(self, at: int) -> int:
        return int.from_bytes(os.pread(self._fd, WORD, at), "little")

    def _read(self) -> None:
        count = self._word(0)
        if count == self._count:
            return
        place = PLACES[count % 2]
        told = json.loads(os.pread(self._fd, self._word(place), place + WORD))
        self._known = {
            namespace: {name: Region(*one) for name, one in regions.items()}
            for namespace, regions in told.items()
        }
        self._count = count

    def _write(self, known: dict[str, dict[str, Region]]) -> None:
        told = {
            namespace: {name: astuple(one) for name, one in regions.items()}
            for namespace, regions in known.items()
        }
        text = dump_json(told).encode()
        count = self._count + 1
        os.pwrite(self._fd, len(text).to_bytes(WORD, "little") + text, PLACES[count % 2])
        os.pwrite(self._fd, count.to_bytes(WORD, "little"), 0)
        self._known, self._count = known, count

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fcntl.flock(self._fd, how)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
