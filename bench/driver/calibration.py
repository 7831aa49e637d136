"""Costs of calls on one service, for the simulation, measured between the replays of bench.cluster.

A round has three measurements on requests that the replays do not use: requests one at a time, with
each process's CPU time of each call; the same requests on two services at once, so that two
processors are busy; and small calls, one at a time and by many callers, whose processes hardly
sleep and so show the cost of a wake-up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final

from attnd import AsyncClient, Client

from bench.cases.trace import Request
from bench.driver.processes import TRIES, Processes, Result, Usage, undisturbed
from bench.driver.replay import CallRecord, ReplayResult, replay
from bench.driver.servers import Server
from simulation.calls import ACTORS, CallCosts

SLICE_S: Final = 0.02
"""`engine.slice_ms`, as the services are started with."""
UNSLICED_S: Final = 1e6
"""The slice if no call of the trace was long enough to be cut."""
SMALL_CALLS: Final = 3000
CALLERS: Final = 32
ENGINE: Final = ACTORS.index("engine")
LEAST_SLEEPS_SAVED: Final = 0.2
"""Sleeps saved per call, below which the cost of a wake-up cannot be estimated."""


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def clear(servers: Sequence[Server]) -> None:
    """Empty the prefix caches."""
    for server in servers:
        with Client(url(server)) as client:
            client.clear()


async def small_calls(server: Server, callers: int, count: int = SMALL_CALLS) -> float:
    """`get_sequence` calls a second by `callers` tasks of one client."""
    client = AsyncClient(url(server))
    name = (await client.create_sequence()).id
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await client.get_sequence(name)

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(callers)))
    rate = count / (time.perf_counter() - begun)
    await client.delete_sequence(name)
    await client.aclose()
    return rate


def count_calls(server: Server, callers: int) -> float:
    """`small_calls` in an event loop of its own."""
    return asyncio.run(small_calls(server, callers))


def slices(server: Server) -> float:
    """The number of slices of long work that a service's engine has run."""
    with Client(url(server)) as client:
        found = re.findall(r"^attnd_slices_total (\S+)$", client.metrics(), re.MULTILINE)
    return sum(map(float, found))


def wakes_s(alone: Usage, many: Usage) -> list[float]:
    """Seconds of a wake-up of each actor: CPU time saved by many callers, over sleeps saved."""
    found = []
    for actor in range(len(ACTORS)):
        saved = alone.sleeps[actor] - many.sleeps[actor]
        spent = alone.cpu_s[actor] - many.cpu_s[actor]
        is_known = saved > LEAST_SLEEPS_SAVED * SMALL_CALLS
        found.append(max(0.0, spent / saved) if is_known else 0.0)
    return found


@dataclass(slots=True)
class Calibration:
    """The figures of all rounds so far."""

    calls: list[CallRecord] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    wakes: list[list[float]] = field(default_factory=list)
    disturbed: int = 0
    is_sliced: bool = False
    tries: int = TRIES

    def run(self, one: Server, two: Sequence[Server], requests: Sequence[Request]) -> None:
        """Another round, on one service and on two of half its size."""
        processes = Processes.of([one])

        def alone() -> ReplayResult:
            clear([one])
            return asyncio.run(replay([(url(one), requests)], 1, processes))

        def beside() -> ReplayResult:
            clear(two)
            return asyncio.run(replay([(url(server), requests) for server in two], 1))

        played, _ = self.counted(undisturbed(processes, alone, self.tries))
        _, seen = self.counted(undisturbed(Processes.of(two), beside, self.tries))
        self.calls += played.calls
        once = sum(call.cpu_s[ENGINE] for call in played.calls)
        self.together.append(min(1.0, len(two) * once / seen.cpu_s[ENGINE]))
        self.is_sliced = slices(one) > 0
        quiet, many = (
            self.counted(undisturbed(processes, partial(count_calls, one, callers), self.tries))[1]
            for callers in (1, CALLERS)
        )
        self.wakes.append(wakes_s(quiet, many))

    def counted(self, run: tuple[Result, Usage]) -> tuple[Result, Usage]:
        """Count a run if it was disturbed."""
        self.disturbed += run[1].is_disturbed
        return run

    def costs(self) -> CallCosts:
        """The costs by all rounds together."""
        wakes = [median(one) for one in zip(*self.wakes, strict=True)]
        slice_s = SLICE_S if self.is_sliced else UNSLICED_S
        return CallCosts.fitted(self.calls, slice_s, median(self.together), wakes)
