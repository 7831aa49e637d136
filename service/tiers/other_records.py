"""Records of other geometries in a store's directory: they stay until their room is needed."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

from service.tiers.files import Files, write_all
from service.tiers.index import Index

ERASED_AT_ONCE: Final = 2**24
"""Bytes that are overwritten between two pieces of others' work."""
DELETED_AT_ONCE: Final = 1024
"""Rows that are deleted in one transaction: some milliseconds."""


class OtherRecords:
    """The file of one geometry's blocks, with its index, of which a namespace can be erased."""

    def __init__(self, directory: int, data: Path, files: Files) -> None:
        self._directory, self._data, self._files = directory, data, files
        self._is_clean = False
        """Whether all places without a record were overwritten."""

    @property
    def num_bytes(self) -> int:
        return self._data.stat().st_size

    def remove(self) -> None:
        """Delete the files."""
        for one in (self._data, *self._data.parent.glob(f"{self._data.stem}.index*")):
            one.unlink(missing_ok=True)

    def clear(self, namespace: str) -> Generator[None, None, None]:
        """Delete a namespace's records and overwrite their bytes, a piece a step, at first with all
        places that have no record: it is not known whose bytes these have. Raises `OSError`."""
        size, path = int(self._data.stem), self._data.with_suffix(".index")
        fd = self._files.open(self._directory, self._data.name)
        try:
            os.close(self._files.open(self._directory, path.name))  # with the right mode
            index = Index(path, read=False)
            try:
                places = index.slots(namespace)
                for first in range(0, len(places), DELETED_AT_ONCE):
                    index.delete(places[first : first + DELETED_AT_ONCE])
                    yield
                kept = set() if self._is_clean else set(index.slots())
            finally:
                index.close()
            end = os.fstat(fd).st_size
            if not self._is_clean:
                places = [slot for slot in range(-(-end // size)) if slot not in kept]
            zeros, at_once = memoryview(bytes(size)), max(1, ERASED_AT_ONCE // size)
            for first in range(0, len(places), at_once):
                for slot in places[first : first + at_once]:
                    write_all(self._files, fd, zeros[: max(0, end - slot * size)], slot * size)
                self._files.sync(fd)
                yield
            self._is_clean = True
        finally:
            os.close(fd)
