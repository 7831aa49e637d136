"""POSIX shared memory objects of clients: opened by name, read and written through a descriptor.

They are never mapped. Whoever made an object can cut it short at any moment: a mapping would then
end this process by SIGBUS, a read merely comes back short.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from service.errors import InvalidRequest

DIRECTORY: Final = "/dev/shm"
NAME: Final = re.compile(r"(?!\.{1,2}$)[!-.0-~]{1,200}")
"""Printable ASCII without a slash, so that it names something in that directory itself."""
FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes from `begin` in the object `name`; `field` is what requests call them."""

    field: str
    name: str
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


class SharedObject:
    """An open object; `identity` is the same for all names of the same memory."""

    __slots__ = ("fd", "identity")

    def __init__(self, span: Span, owners: Collection[int]) -> None:
        """That which has the span, and belongs to one of the users `owners`.

        Raises InvalidRequest.
        """
        try:
            self.fd = os.open(f"{DIRECTORY}/{span.name}", FLAGS)
        except OSError as error:
            raise unusable(span, f"cannot be opened: {error.strerror}") from None
        try:
            told = os.fstat(self.fd)
            if not stat.S_ISREG(told.st_mode) or told.st_nlink > 1:
                raise unusable(span, "is no plain object: make it with shm_open")
            if told.st_uid not in owners:
                rule = "belongs to another user than the service and those in server.socket_uids"
                raise unusable(span, rule)
            check_size(span, told.st_size)
        except BaseException:
            os.close(self.fd)
            raise
        self.identity = (told.st_dev, told.st_ino)

    def close(self) -> None:
        os.close(self.fd)

    def check(self, span: Span) -> None:
        """The object has the span now. Raises InvalidRequest."""
        check_size(span, os.fstat(self.fd).st_size)

    def read(self, span: Span, into: memoryview) -> None:
        """Copy the span into `into`, which is as long. Raises InvalidRequest."""
        done = 0
        while done < span.size:
            try:
                count = os.preadv(self.fd, [into[done:]], span.begin + done)
            except OSError as error:
                raise unusable(span, f"cannot be read: {error.strerror}") from None
            if not count:
                raise unusable(span, f"has become shorter while it was read: {span.end} are needed")
            done += count

    def write(self, span: Span, data: memoryview) -> None:
        """Copy `data` to the beginning of the span. Raises InvalidRequest."""
        self.check(span)  # writing past its end would make the object longer
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self.fd, [data[done:]], span.begin + done)
            except OSError as error:
                raise unusable(span, f"cannot be written: {error.strerror}") from None


class Opened:
    """The objects that a request's spans lie in, each opened once. To be closed."""

    __slots__ = ("found", "owners")

    def __init__(self, owners: Collection[int]) -> None:
        self.owners = owners
        self.found: dict[str, SharedObject] = {}

    def of(self, span: Span) -> SharedObject:
        """The object that has the span. Raises InvalidRequest."""
        found = self.found.get(span.name)
        if found is None:
            found = self.found[span.name] = SharedObject(span, self.owners)
        else:
            found.check(span)
        return found

    def close(self) -> None:
        """All of them; once more does no harm."""
        while self.found:
            self.found.popitem()[1].close()


def check_size(span: Span, size: int) -> None:
    """An object of `size` bytes has the span. Raises InvalidRequest."""
    if span.end > size:
        raise unusable(span, f"has {size} bytes now, {span.end} are needed")


def name_of(key: str) -> str | None:
    """The object that a client's key names, None where it can name none."""
    name = key.removeprefix("/")
    return name if NAME.fullmatch(name) else None


def unusable(span: Span, why: str) -> InvalidRequest:
    return InvalidRequest(span.field, span.name, f"the shared memory object {why}")
