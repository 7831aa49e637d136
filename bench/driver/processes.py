"""Processor time of a service's processes, and of the rest of the machine beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from bench.driver.servers import Server

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MAX_OTHERS: Final = 0.05
"""Share of the processors that other processes may use; beyond it a run counts as disturbed."""
TRIES: Final = 3
Result = TypeVar("Result")


def children(server: Server) -> dict[str, list[int]]:
    """The process ids of a service's doors and engines, under "door" and "engine"."""
    found: dict[str, list[int]] = {"door": [], "engine": []}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
        if int(words[1]) == server.pid:
            kind = "engine" if "service.engine" in command else "door"
            found[kind].append(int(status.parent.name))
    return found


def spent_s(pids: Iterable[int]) -> float:
    """Processor seconds of processes, all threads together."""
    spent = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                spent += int((task / "schedstat").read_text().split()[0])
            except (OSError, ProcessLookupError):  # a thread that has ended
                continue
    return spent / 1e9


def machine_s() -> float:
    """Seconds in which the machine's processors were not idle, stolen time included."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds of caller, doors and engines, and the share of other processes."""

    cpu_s: tuple[float, ...]
    others: float


def measured_usage(servers: Sequence[Server], act: Callable[[], Result]) -> tuple[Result, Usage]:
    """The result of `act`, and the usage meanwhile."""
    every = [children(server) for server in servers]
    doors, engines = ([pid for one in every for pid in one[kind]] for kind in ("door", "engine"))
    groups = ([os.getpid()], doors, engines)
    before, machine, begun = [*map(spent_s, groups)], machine_s(), time.perf_counter()
    result = act()
    wall_s = time.perf_counter() - begun
    cpu_s = tuple(b - a for a, b in zip(before, map(spent_s, groups), strict=True))
    others = (machine_s() - machine - sum(cpu_s)) / wall_s / len(os.sched_getaffinity(0))
    return result, Usage(cpu_s, round(max(0.0, others), 4))


def undisturbed(
    servers: Sequence[Server], act: Callable[[], Result], tries: int = TRIES
) -> tuple[Result, Usage]:
    """As `measured_usage`, up to `tries` times while a run is disturbed."""
    for left in reversed(range(tries)):
        result, usage = measured_usage(servers, act)
        if usage.others <= MAX_OTHERS or not left:
            return result, usage
        print(f"disturbed: others used {usage.others:.0%} of the machine; again", flush=True)
    raise AssertionError("the last try returns")
