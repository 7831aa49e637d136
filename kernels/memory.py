"""How much memory a pool could take: the device's for cuda, the host's for cpu."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

Kind = Literal["cpu", "cuda"]

LIMITS: Final = ("memory.max", "memory.high", "memory.limit_in_bytes")
USED: Final = ("memory.current", "memory.usage_in_bytes")
"""Files of a control group, of version 2 and of version 1."""
RECLAIMABLE: Final = ("active_file", "inactive_file", "slab_reclaimable")
"""Fields of `memory.stat`: memory that the system takes back when a process needs it."""


def free_bytes(kind: Kind, device: int = 0) -> int:
    """Bytes free now where the backend `kind` keeps its pool."""
    if kind == "cuda":
        return int(importlib.import_module(".cuda.device.devices", __package__).free_bytes(device))
    return host_free_bytes()


def host_free_bytes(root: Path = Path("/")) -> int:
    """Available bytes of the machine, or what the limits of this process's control group (v1 or
    v2) and of the groups above it leave, if that is less.

    `root` is the folder that has `proc` and `sys`. Raises `RuntimeError` where the system does not
    report its memory.
    """
    meminfo = root / "proc/meminfo"
    try:
        lines = meminfo.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(f"{meminfo} cannot be read: set pool.num_pages") from error
    entries = [line.split() for line in lines if line.startswith("MemAvailable:")]
    if not entries:
        raise RuntimeError(f"{meminfo} has no MemAvailable: set pool.num_pages")
    return int(min([int(entries[0][1]) * 1024, *map(group_free_bytes, groups_of(root))]))


def groups_of(root: Path) -> Iterator[Path]:
    """Folders of the control groups that hold this process, each up to its hierarchy's root.

    Without a namespace of its own a container sees its group as the root, and the path is the
    host's: folders of a path that do not exist have no limits.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts = ("memory",) if "memory" in controllers.split(",") else ()
        for mount in mounts if controllers else ("", "unified"):
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts) if ".." not in parts else 0, -1, -1):
                yield root.joinpath("sys/fs/cgroup", mount, *parts[:depth])


def group_free_bytes(group: Path) -> float:
    """Bytes that a control group may still take, where memory that can be reclaimed counts as free;
    infinity without a limit."""
    limits = [number_in(group / name) for name in LIMITS]
    used = min(number_in(group / name) for name in USED)
    if (limit := min(limits)) == math.inf or used == math.inf:
        return math.inf
    stat = dict(line.split() for line in text_of(group / "memory.stat").splitlines())
    # v1 counts the groups below it only in the fields that begin with total_
    reclaimable = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in RECLAIMABLE)
    return max(0, limit - max(0, used - reclaimable))


def number_in(path: Path) -> float:
    """Infinity for a missing file or `max`."""
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else math.inf


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
