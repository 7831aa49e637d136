"""Contents of key and certificate files, in memory that the supervisor shares."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

ReadFile = Callable[[str], bytes]
"""Returns a file's contents by its path. Raises OSError."""
LENGTH_BYTES: Final = 8
DIGEST_BYTES: Final = 32
RETRY_S: Final = 0.01
RETRIES: Final = 500


def anonymous_memory(name: str) -> int:
    """A file descriptor of memory without a name; it is freed with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def from_disk(path: str) -> bytes:
    """Raises OSError, also for a file that every user can change."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
            raise OSError("others can write to it: chmod o-w it")
        return file.read()


def why_unreadable(error: OSError) -> str:
    """The system's error for a file, and the remedy."""
    text = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return f"{text}: name a file that exists"
    if isinstance(error, PermissionError):
        return f"{text}: make it readable by the service's user, {os.getuid()}"
    return text


class HandedFiles:
    """Files by their paths. The supervisor writes them, its processes read them.

    A digest shows a reader that a write is in progress; it then reads again.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, files: Mapping[str, bytes]) -> None:
        encoded = {path: base64.b64encode(data).decode() for path, data in files.items()}
        text = json.dumps(encoded).encode()
        head = len(text).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(text).digest()
        os.pwrite(self.fd, head + text, 0)

    def read(self, path: str) -> bytes:
        """Raises OSError."""
        for _ in range(RETRIES):
            head = os.pread(self.fd, LENGTH_BYTES + DIGEST_BYTES, 0)
            length = int.from_bytes(head[:LENGTH_BYTES], "little")
            text = os.pread(self.fd, length, len(head))
            if hashlib.sha256(text).digest() == head[LENGTH_BYTES:]:
                found: dict[str, str] = json.loads(text)
                if path not in found:
                    raise FileNotFoundError(f"the supervisor has no file {path}")
                return base64.b64decode(found[path])
            time.sleep(RETRY_S)
        raise OSError("the supervisor did not finish writing the files")


@contextmanager
def as_file(data: bytes) -> Iterator[str]:
    """A path at which a library reads these bytes; they are in memory only."""
    fd = anonymous_memory("attnd-file")
    try:
        os.pwrite(fd, data, 0)
        yield f"/dev/fd/{fd}"
    finally:
        os.close(fd)
