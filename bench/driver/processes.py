"""Processor time of a service's processes, and of the rest of the machine beside them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from bench.driver.servers import Server

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
SLEEPS: Final = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
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


class Processes:
    """Groups of processes; each figure is the sum over a group's threads."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups

    @classmethod
    def of(cls, servers: Sequence[Server]) -> Processes:
        """Three groups: this process, which calls; the servers' doors; their engines."""
        every = [children(server) for server in servers]
        doors = [pid for one in every for pid in one["door"]]
        return cls([[os.getpid()], doors, [pid for one in every for pid in one["engine"]]])

    def read(self) -> tuple[float, ...]:
        """Processor seconds of each group."""
        return tuple(sum(map(spent_s, group)) for group in self._groups)

    def sleeps(self) -> tuple[int, ...]:
        """Voluntary context switches of each group."""
        return tuple(sum(map(slept, group)) for group in self._groups)


def spent_s(pid: int) -> float:
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent += int((task / "schedstat").read_text().split()[0])
        except (OSError, ProcessLookupError):  # a thread that has ended
            continue
    return spent / 1e9


def slept(pid: int) -> int:
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            count += sum(map(int, SLEEPS.findall((task / "status").read_text())))
        except (OSError, ProcessLookupError):
            continue
    return count


def machine_s() -> float:
    """Seconds in which the machine's processors were not idle, stolen time included."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Usage:
    """Wall time, processor time and sleeps of each group, and the share of other processes."""

    wall_s: float
    cpu_s: tuple[float, ...]
    sleeps: tuple[int, ...]
    others: float

    @property
    def is_disturbed(self) -> bool:
        return self.others > MAX_OTHERS


def measured_usage(processes: Processes, act: Callable[[], Result]) -> tuple[Result, Usage]:
    """The result of `act`, and the usage meanwhile."""
    spent, slept_before = processes.read(), processes.sleeps()
    machine, begun = machine_s(), time.perf_counter()
    result = act()
    wall_s = time.perf_counter() - begun
    cpu_s = tuple(b - a for a, b in zip(spent, processes.read(), strict=True))
    sleeps = tuple(b - a for a, b in zip(slept_before, processes.sleeps(), strict=True))
    others = machine_s() - machine - sum(cpu_s)
    cores = len(os.sched_getaffinity(0))
    return result, Usage(wall_s, cpu_s, sleeps, round(max(0.0, others / (wall_s * cores)), 4))


def undisturbed(
    processes: Processes, act: Callable[[], Result], tries: int = TRIES
) -> tuple[Result, Usage]:
    """As `measured_usage`, up to `tries` times while a run is disturbed."""
    for left in reversed(range(tries)):
        result, seen = measured_usage(processes, act)
        if not (seen.is_disturbed and left):
            return result, seen
        print(f"disturbed: others used {seen.others:.0%} of the machine; again", flush=True)
    raise AssertionError("the last try returns")
