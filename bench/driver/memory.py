"""Memory of a process and all that it started (Linux)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
MODULE: Final = re.compile(rb"(?:^|\0)(?:-m|[^\0]*/service/launch\.py)\0([\w.]+)")


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of one process: `rss` counts shared pages in full, `pss` its share of them."""

    name: str
    rss: float
    pss: float


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def memory(pid: int) -> Memory:
    """What one process holds now."""
    rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.M)}
    return Memory(name_of(pid), kib["Rss"] / 1024, kib["Pss"] / 1024)


def name_of(pid: int) -> str:
    """The module that a Python process runs, else its program."""
    command = (PROC / str(pid) / "cmdline").read_bytes()
    module = MODULE.search(command)
    return module[1].decode() if module else Path(command.split(b"\0")[0].decode()).name
