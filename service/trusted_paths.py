"""Checks that no other user can put another directory or file in a path's place."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

TRUSTED: Final = (0,)
"""Users beside this process's own whose links are followed."""


def check_parents(path: Path) -> None:
    """Raises `PermissionError` where a directory above `path` can be written by others and has no
    sticky bit, or is a link of another user. Missing ones are passed over."""
    above = dict.fromkeys((*path.absolute().parents, *path.resolve().parents))
    for one in above:
        with suppress(FileNotFoundError):
            link, found = one.lstat(), one.stat()
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), *TRUSTED):
                raise PermissionError(errno.EPERM, f"{one} is a link of user {link.st_uid}")
            if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                raise PermissionError(errno.EPERM, f"others can write to {one}: chmod o-w it")
