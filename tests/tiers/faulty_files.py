"""Files that fail on demand: the faults of disks, at the seam of the record store."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from service.tiers.files import Files


@dataclass
class FaultyFiles(Files):
    """Real files; `most` bytes go through one read or write, and errors are raised on demand."""

    most: int | None = None
    write_error: int | None = None
    read_error: int | None = None
    sync_error: int | None = None
    writes_until_error: int = 0
    lost_bytes: int = 0
    """Bytes at the end of each write that are reported as written and are not: a torn write."""
    num_syncs: int = 0

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        if self.read_error is not None:
            raise OSError(self.read_error, errno.errorcode[self.read_error])
        return super().read(fd, into[: self.most], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.write_error is not None:
            if not self.writes_until_error:
                raise OSError(self.write_error, errno.errorcode[self.write_error])
            self.writes_until_error -= 1
        data = data[: self.most]
        kept = data[: len(data) - self.lost_bytes]
        return super().write(fd, kept, offset) + len(data) - len(kept)

    def sync(self, fd: int) -> None:
        self.num_syncs += 1
        if self.sync_error is not None:
            raise OSError(self.sync_error, errno.errorcode[self.sync_error])
        super().sync(fd)
