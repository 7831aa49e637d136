"""The replay of bench.driver.replay, simulated: caller, doors and engines share a machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from bench.cases.trace import Request
from bench.driver.replay import DECODES, KINDS, PAGE, CallRecord, summary
from simulation.block_pool import BlockPool
from simulation.clock import Act, Clock, Cores
from simulation.workers import Engine, Task, Worker

ACTORS: Final = ("caller", "door", "engine")
"""The processes whose time a call takes, in this order."""
WAKES: Final = (1, 2, 1)
"""Wake-ups of each actor for a single call."""
ATTENTION: Final = frozenset({"prefill", "decode"})
NEW_DECODED: Final = -(-DECODES // PAGE)
"""Pages that a request's decoded tokens take."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """CPU seconds by kind of call and actor, `a + b * new + c * pairs`.

    `waiting_s` is wall time in which no actor works, `wake_s` each actor's part of the CPU time
    for a wake-up, and `together` the speed of a processor beside a busy one.
    """

    seconds: dict[str, list[list[float]]]
    waiting_s: dict[str, float]
    slice_s: float
    together: float = 1.0
    wake_s: Sequence[float] = (0.0, 0.0, 0.0)

    @classmethod
    def fitted(
        cls,
        calls: Iterable[CallRecord],
        slice_s: float,
        together: float = 1.0,
        wake_s: Sequence[float] = (0.0, 0.0, 0.0),
    ) -> Self:
        """By least squares from calls made one at a time."""
        every = list(calls)
        seconds, waiting = {}, {}
        for kind in KINDS:
            some = [call for call in every if call.kind == kind]
            cpu = np.array([call.cpu_s for call in some])
            x = np.array([(1.0, call.new, call.pairs) for call in some])
            seconds[kind] = [fit(x, cpu[:, actor]).tolist() for actor in range(len(ACTORS))]
            idle = np.array([call.wall_s for call in some]) - cpu.sum(axis=1)
            waiting[kind] = max(0.0, float(np.median(idle)))
        return cls(seconds, waiting, slice_s, together, list(wake_s))

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> Self:
        names = ("seconds", "waiting_s", "slice_s", "together", "wake_s")
        return cls(**{name: document[name] for name in names})

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, kind: str, new: int, pairs: int) -> list[float]:
        """Seconds of each actor for a single call."""
        x = (1.0, new, pairs)
        return [sum(a * b for a, b in zip(one, x, strict=True)) for one in self.seconds[kind]]

    def awake(self, kind: str, new: int, pairs: int) -> list[float]:
        """Seconds of each actor without its wake-ups."""
        every = zip(self.of(kind, new, pairs), self.wake_s, WAKES, strict=True)
        return [max(0.0, seconds - wake_s * count) for seconds, wake_s, count in every]

    def shared_s(self, kind: str) -> float:
        """The part of an attention call that a launch of several calls takes only once."""
        if kind not in ATTENTION:
            return 0.0
        engine = ACTORS.index("engine")
        return max(0.0, self.seconds["decode"][engine][0] - self.seconds["delete"][engine][0])


def fit(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Coefficients >= 0 with the least squares of the relative error of `x @ coefficients`."""
    weight = 1.0 / np.maximum(y, 0.1 * np.median(y) + 1e-9)
    columns = [column for column in range(x.shape[1]) if np.ptp(x[:, column]) or column == 0]
    while True:
        chosen = x[:, columns] * weight[:, np.newaxis]
        scale = np.abs(chosen).max(axis=0)
        found = np.linalg.lstsq(chosen / scale, y * weight, rcond=None)[0] / scale
        if (found >= 0).all() or len(columns) == 1:
            break
        columns.remove(columns[int(found.argmin())])
    whole = np.zeros(x.shape[1])
    whole[columns] = np.maximum(found, 0.0)
    return whole


@dataclass(slots=True, eq=False)
class Service:
    """A door and an engine with its pool."""

    door: Worker
    engine: Engine
    pool: BlockPool


class Replay:
    """Requests in a closed loop on services, as `bench.driver.replay.replay` plays them."""

    def __init__(self, costs: CallCosts, cores: float, pools: Sequence[int]) -> None:
        self.clock = Clock()
        shared = Cores(self.clock, cores, costs.together)
        self.costs = costs
        caller_s, door_s, engine_s = costs.wake_s
        self.caller = Worker(shared, caller_s)
        self.services = [
            Service(
                Worker(shared, door_s), Engine(shared, engine_s, costs.slice_s), BlockPool(pool)
            )
            for pool in pools
        ]
        self.request_s: list[float] = []
        self.tokens = self.cached = self.num_calls = 0

    def run(self, shares: Sequence[Sequence[Request]], workers: int) -> dict[str, float]:
        """Replays all requests with `workers` for each service; returns a replay's figures."""
        for service, requests in zip(self.services, shares, strict=True):
            left = deque(requests)
            for _ in range(workers):
                self._work(service, left)
        self.clock.run()
        hit_rate = self.cached / max(1, self.tokens)
        return summary(self.request_s, self.clock.now, hit_rate, self.num_calls)

    def _work(self, service: Service, left: deque[Request]) -> None:
        """A worker's next request, and all after it."""
        if left:
            self._replay(service, left.popleft(), lambda: self._work(service, left))

    def _replay(self, service: Service, request: Request, then: Act) -> None:
        """One request, from create to delete."""
        begun = self.clock.now
        blocks, length = request.blocks, len(request.blocks) * PAGE
        pool, cached = service.pool, service.pool.match(blocks)
        own = len(blocks) - cached + NEW_DECODED
        if pool.hold(blocks[:cached], own) is None:
            raise ValueError(f"a prompt of {len(blocks)} blocks does not fit beside others")
        self.tokens += length
        self.cached += cached * PAGE
        new = length - cached * PAGE
        rows = max(1, new)
        first = [("create", length, 0), ("prefill", new, rows * length - rows * (rows - 1) // 2)]
        rest = [("decode", 1, length + step + 1) for step in range(DECODES)]

        def commit() -> None:
            pool.release(blocks[:cached], own)
            pool.hold(blocks, NEW_DECODED)  # from now on they can be matched
            self._calls(service, deque(rest), delete)

        def delete() -> None:
            self._calls(service, deque([("delete", length, 0)]), after, arrived=release)

        def release() -> None:
            pool.release(blocks, NEW_DECODED)

        def after() -> None:
            self.request_s.append(self.clock.now - begun)
            then()

        self._calls(service, deque([*first, ("commit", new, 0)]), commit)

    def _calls(
        self,
        service: Service,
        calls: deque[tuple[str, int, int]],
        after: Act,
        arrived: Act | None = None,
    ) -> None:
        """Calls in turn: caller, door, engine, door, caller.

        `arrived` runs as a call arrives at the engine, `after` when all calls are answered.
        """
        if not calls:
            after()
            return
        kind, new, pairs = calls.popleft()
        self.num_calls += 1
        caller_s, door_s, engine_s = self.costs.awake(kind, new, pairs)
        door = service.door

        def to_engine() -> None:
            if arrived is not None:
                arrived()
            service.engine.take(Task(engine_s, self.costs.shared_s(kind), back))

        def back() -> None:
            door.give(door_s / 2, lambda: self.caller.give(caller_s / 2, replied))

        def replied() -> None:
            self._calls(service, calls, after, arrived)

        def begin() -> None:
            self.caller.give(caller_s / 2, lambda: door.give(door_s / 2, to_engine))

        if self.costs.waiting_s[kind]:
            self.clock.after(self.costs.waiting_s[kind], begin)
        else:
            begin()
