"""The replay on a simulated cluster: one door that places prompts by the router's own rule.

The door knows of each engine only what the router would know at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.cases.trace import Request
from bench.driver.replay import PAGE, summary
from service.cluster.membership.engine import LATEST_WEIGHT
from service.cluster.membership.members import POLL_S
from service.cluster.placement.cost import Load, Pace, busy_until_s, choose
from service.cluster.placement.inflight_prompts import Underway
from service.cluster.placement.placer import worth_waiting_s
from service.cluster.placement.prefixes import Prefixes
from simulation.block_pool import BlockPool
from simulation.calls import ACTORS, CallCosts, Replay, Service
from simulation.clock import Act, Clock

ENGINE: Final = ACTORS.index("engine")
WORK: Final = frozenset({"create", "prefill", "commit", "decode"})
"""Calls with tensors."""


class Watched(BlockPool):
    """A pool with the events of its engine: time, kind and blocks."""

    __slots__ = ("clock", "events")

    def __init__(self, capacity: int, clock: Clock) -> None:
        super().__init__(capacity)
        self.clock = clock
        self.events: deque[tuple[float, str, Sequence[int]]] = deque()

    def emit(self, kind: str, blocks: Sequence[int]) -> None:
        self.events.append((self.clock.now, kind, blocks))

    def hold(self, blocks: Sequence[int], own: int = 0) -> list[int] | None:
        evicted = super().hold(blocks, own)
        if evicted:
            self.emit("removed", evicted)
        return evicted


@dataclass(slots=True, eq=False)
class Known:
    """The door's knowledge of an engine."""

    name: str
    pool: Watched
    held: int = 0
    promised: int = 0
    unwritten: int = 0
    """Pages that the pool holds already, and whose rows have not arrived."""
    queue_s: float = 0.0
    until_s: float = 0.0
    num_waiting: int = 0

    def load(self, now: float, pace: Pace) -> Load:
        free, work_s = self.pool.capacity - self.held, max(0.0, self.until_s - now)
        return Load(free, 0, self.held, self.queue_s, work_s, self.promised, pace)

    def answered(self, now: float, waited_s: float, *, is_work: bool) -> None:
        """A call was answered after a wait of `waited_s` for its turn."""
        self.held = self.pool.num_held - self.unwritten
        self.queue_s += LATEST_WEIGHT * (waited_s - self.queue_s)
        self.num_waiting -= is_work
        if is_work and not self.num_waiting:
            self.until_s -= max(0.0, self.until_s - now) / 2


class Clustered(Replay):
    """Requests in a closed loop on engines behind one door."""

    def __init__(
        self, costs: CallCosts, cores: float, pools: Sequence[int], seed: int | None = None
    ) -> None:
        super().__init__(costs, cores, pools, seed)
        self.pace = pace_of(costs)
        self.prefixes = Prefixes()
        self.knows: dict[Service, Known] = {}
        self.waiting: dict[Underway, list[Act]] = {}
        for number, service in enumerate(self.services):
            service.door = self.services[0].door
            service.pool = pool = Watched(service.pool.capacity, self.clock)
            self.knows[service] = Known(str(number), pool)

    def replay(self, requests: Sequence[Request], workers: int) -> dict[str, float]:
        """Replays all requests with `workers`; returns a replay's figures."""
        left = deque(requests)
        for _ in range(workers):
            self._next(left)
        self.clock.run()
        hit_rate = self.cached / max(1, self.tokens)
        return summary(self.request_s, self.clock.now, hit_rate, self.num_calls)

    def _next(self, left: deque[Request]) -> None:
        """Place a worker's next request, which may wait for pages of another prompt."""
        if not left:
            return
        request, now = left.popleft(), self.clock.now
        self._learn(now)
        keys = [key(block) for block in request.blocks]
        loads = {one.name: one.load(now, self.pace) for one in self.knows.values()}
        matched = self.prefixes.matched(keys, now)
        chosen = choose(loads, matched, len(keys))
        there = matched.get(chosen, 0)
        cached, other = self.prefixes.awaited(chosen, keys[:there])
        own, service = Underway(), self.services[int(chosen)]
        self.waiting[own] = []
        self.prefixes.expect(chosen, keys[there:], now, own)
        one = self.knows[service]
        one.promised += max(len(keys) - there, 1)
        one.until_s = busy_until_s(one.until_s, now, self.pace.span_s(float(there), len(keys)))
        if other is None or not other.is_begun or other.ended.is_set():
            self._begin(service, request, own, left)
            return
        most_s = worth_waiting_s(loads[chosen], cached, there)
        self._after(other, most_s, lambda: self._begin(service, request, own, left))

    def _after(self, other: Underway, most_s: float, act: Act) -> None:
        """Run `act` when the other prompt is cached, or after `most_s`."""
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                act()

        self.waiting[other].append(once)
        self.clock.after(most_s, once)

    def _begin(
        self, service: Service, request: Request, own: Underway, left: deque[Request]
    ) -> None:
        one = self.knows[service]
        new = len(request.blocks) - one.pool.match(request.blocks)
        one.unwritten += new

        def written() -> None:
            own.is_begun = True
            one.unwritten -= new
            one.promised -= min(one.promised, new)

        def committed() -> None:
            one.pool.emit("stored", request.blocks)
            own.ended.set()
            for act in self.waiting.pop(own):
                act()

        self._play(service, request, lambda: self._next(left), written, committed)

    def _learn(self, now: float) -> None:
        """Take the events up to the door's last poll."""
        polled = now // POLL_S * POLL_S
        for one in self.knows.values():
            events = one.pool.events
            while events and events[0][0] <= polled:
                _, kind, blocks = events.popleft()
                self.prefixes.take(one.name, event(kind, blocks))

    def sent(self, service: Service, kind: str) -> None:
        self.knows[service].num_waiting += kind in WORK

    def answered(self, service: Service, kind: str, engine_s: float, waited_s: float) -> None:
        self.knows[service].answered(self.clock.now, max(0.0, waited_s), is_work=kind in WORK)


def pace_of(costs: CallCosts) -> Pace:
    """The pace that an engine with these costs reports."""
    _, row_s, pair_s = costs.seconds["prefill"][ENGINE]
    page_s = PAGE * row_s + pair_s * PAGE * (PAGE + 1) / 2
    return Pace(page_s, pair_s * PAGE**2, costs.seconds["decode"][ENGINE][2] * PAGE)


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def event(kind: str, blocks: Sequence[int]) -> dict[str, Any]:
    keys = [key(block).hex() for block in blocks]
    return {"type": kind, "namespace": "replayed", "page_keys": keys}
