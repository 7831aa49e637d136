"""The file operations of the record store: one seam through which tests inject faults."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from service.trusted_paths import check_parents

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


class Files:
    """Reads and writes files of one directory; every method can raise `OSError`."""

    def make_directory(self, path: Path) -> int:
        """The descriptor of a directory that only its owner, this process's user, can read, made
        if it does not exist. No link in its place is followed, and no file of others accepted."""
        check_parents(path)
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed")
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with closed_on_error(fd):
            check_owner(os.fstat(fd))
            os.fchmod(fd, DIRECTORY_MODE)
            for one in os.listdir(fd):
                check_owner(os.stat(one, dir_fd=fd, follow_symlinks=False), one)
        return fd

    def open(self, directory: int, name: str) -> int:
        """The descriptor of a file that only its owner, this process's user, can read, made if it
        does not exist. `directory` is a descriptor, too."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, FILE_MODE, dir_fd=directory)
        with closed_on_error(fd):
            check_owner(os.fstat(fd), name)
            os.fchmod(fd, FILE_MODE)
        return fd

    def lock(self, fd: int) -> None:
        """Lock a file until it is closed. Raises `BlockingIOError` where another process has."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read up to `into`'s size; returns the number of bytes, fewer at the end of the file."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`; returns the number of bytes."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Return when all that was written is on the device."""
        os.fdatasync(fd)

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether an open file is still the one at `path`."""
        try:
            return os.path.samestat(os.fstat(fd), path.stat())
        except FileNotFoundError:
            return False


def check_owner(found: os.stat_result, name: str = "it") -> None:
    """Raises `PermissionError` where another user could read what is written."""
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{name} belongs to user {found.st_uid}")


@contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def read_all(files: Files, fd: int, into: memoryview, offset: int) -> int:
    """Read until `into` is full or the file ends; returns the number of bytes."""
    done = 0
    while done < len(into) and (count := files.read(fd, into[done:], offset + done)):
        done += count
    return done


def write_all(files: Files, fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. Raises `OSError`."""
    done = 0
    while done < len(data):
        count = files.write(fd, data[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the file took no more bytes")
        done += count


def sizes_of(path: Path) -> int:
    """Bytes that the files of a directory take; 0 if there is none."""
    with suppress(OSError):
        return sum(one.stat().st_size for one in os.scandir(path) if one.is_file())
    return 0
