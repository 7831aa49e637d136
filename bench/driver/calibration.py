"""What calls cost on one service, for the simulation: measured in pieces, between the replays that
a simulation with these costs is held to, on other requests.

A piece is three measurements. Requests one at a time, with what each process used of a processor
for each call. The same requests on two services at once, one at a time on each, so that both
processors are busy. And small calls, one at a time and by many callers: a process that hardly
sleeps saves what it takes to wake up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from attnd import AsyncClient, Client

from bench.cases.trace import Request
from bench.driver.processes import Processes, Result, Watched, undisturbed
from bench.driver.replay import Called, Played, replay
from bench.driver.servers import Server
from simulation.calls import ACTORS, CallCosts

SLICE_S: Final = 0.02
"""`engine.slice_ms`, as the services are started with."""
UNSLICED_S: Final = 1e6
"""Where the engine's estimates call nothing of the trace long."""
SMALL_CALLS: Final = 3000
CALLERS: Final = 32
ENGINE: Final = ACTORS.index("engine")
LEAST_SLEEPS_SAVED: Final = 0.2
"""Of a call: where no more is saved, nothing can be said of what waking up takes."""


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def clear(servers: Sequence[Server]) -> None:
    """Nothing is cached any more."""
    for server in servers:
        with Client(url(server)) as client:
            client.clear()


async def small_calls(server: Server, callers: int, count: int = SMALL_CALLS) -> float:
    """Calls a second that ask for a sequence's length, by so many callers of one client."""
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


def slices(server: Server) -> float:
    """Slices of long work that a service's engine has run."""
    with Client(url(server)) as client:
        found = re.findall(r"^attnd_slices_total (\S+)$", client.metrics(), re.MULTILINE)
    return sum(map(float, found))


def wakes_s(alone: Watched, many: Watched) -> list[float]:
    """Seconds that each actor takes to wake up, by what it used and how often it slept in as many
    calls one at a time and by many callers."""
    found = []
    for actor in range(len(ACTORS)):
        saved = alone.sleeps[actor] - many.sleeps[actor]
        spent = alone.cpu_s[actor] - many.cpu_s[actor]
        told = saved > LEAST_SLEEPS_SAVED * SMALL_CALLS
        found.append(max(0.0, spent / saved) if told else 0.0)
    return found


@dataclass(slots=True)
class Calibration:
    """What the pieces have told so far."""

    calls: list[Called] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    wakes: list[list[float]] = field(default_factory=list)
    disturbed: int = 0
    is_sliced: bool = False

    def piece(self, one: Server, two: Sequence[Server], requests: Sequence[Request]) -> None:
        """Another piece, by one service and by two that are as large together."""
        processes = Processes.of([one])

        def alone() -> Played:
            clear([one])
            return asyncio.run(replay([(url(one), requests)], 1, processes))

        def beside() -> Played:
            clear(two)
            return asyncio.run(replay([(url(server), requests) for server in two], 1))

        played, _ = self.take(undisturbed(processes, alone))
        _, seen = self.take(undisturbed(Processes.of(two), beside))
        self.calls += played.calls
        once = sum(call.cpu_s[ENGINE] for call in played.calls)
        self.together.append(min(1.0, len(two) * once / seen.cpu_s[ENGINE]))
        self.is_sliced = slices(one) > 0
        quiet, many = (
            self.take(undisturbed(processes, lambda n=n: asyncio.run(small_calls(one, n))))[1]  # type: ignore[misc]
            for n in (1, CALLERS)
        )
        self.wakes.append(wakes_s(quiet, many))

    def take(self, told: tuple[Result, Watched]) -> tuple[Result, Watched]:
        self.disturbed += told[1].is_disturbed
        return told

    def costs(self) -> CallCosts:
        """Of all pieces together."""
        wakes = [median(one) for one in zip(*self.wakes, strict=True)]
        slice_s = SLICE_S if self.is_sliced else UNSLICED_S
        return CallCosts.fitted(self.calls, slice_s, median(self.together), wakes)
