"""A process's processor time, memory and open files, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one process, in base units."""

    parent: int
    cpu_seconds: float
    start_time_seconds: float
    """Since the epoch."""
    virtual_memory_bytes: int
    resident_memory_bytes: int
    """Shared memory that it has touched included."""
    open_fds: int
    max_fds: int


def usage(pid: int) -> Usage | None:
    """None without such a process, or without /proc."""
    try:
        line = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        # the name in front may hold spaces and brackets: numbers begin behind the last one
        fields = line.rpartition(")")[2].split()
        return Usage(
            parent=int(fields[1]),
            cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            start_time_seconds=boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK"),
            virtual_memory_bytes=int(fields[20]),
            resident_memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            open_fds=len(os.listdir(PROC / str(pid) / "fd")),
            max_fds=max_fds(pid),
        )
    except OSError:
        return None


def boot_time() -> int:
    lines = (PROC / "stat").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("btime "))


def max_fds(pid: int) -> int:
    """The soft limit of open files; unlimited never holds for these."""
    lines = (PROC / str(pid) / "limits").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[3]) for line in lines if line.startswith("Max open files"))
