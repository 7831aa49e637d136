"""How much memory a pool could take: the device's for cuda, the host's for cpu."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final, Literal

Kind = Literal["cpu", "cuda"]

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes(kind: Kind, device: int = 0) -> int:
    """Bytes free now where the backend `kind` keeps its pool."""
    if kind == "cuda":
        return int(importlib.import_module("kernels.cuda.device.devices").free_bytes(device))
    return host_free_bytes(MEMINFO, CGROUP)


def host_free_bytes(meminfo: Path, cgroup: Path) -> int:
    """Available bytes of the machine, or the container's remaining limit if that is less.

    Raises `RuntimeError` where the system does not say.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(f"{meminfo} cannot be read: set pool.num_pages") from error
    entries = [line.split() for line in lines if line.startswith("MemAvailable:")]
    if not entries:
        raise RuntimeError(f"{meminfo} has no MemAvailable: set pool.num_pages")
    free = int(entries[0][1]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
