"""Many GPU engines behind a router.

Requests are placed by prefix and load, and prefilled in pieces between decode steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from bench.cases.trace import BLOCK_TOKENS, TraceRequest
from bench.driver.replay import PAGE
from service.cluster.placement.cost import Pace
from simulation.block_pool import BlockPool
from simulation.gpu_costs import GpuCosts, Model
from simulation.placement import Placing

FP8: Final = Model()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The assumptions on a fleet, each a line in docs/simulation.md.

    `model_s`: the model's own time of a step, on other GPUs. `chunk`: most tokens prefilled beside
    a step.
    """

    engines: int = 1000
    pool_bytes: float = 120e9
    model: Model = FP8
    model_s: float = 0.012
    chunk: int = 4096
    router_s: float = 0.001

    @property
    def blocks(self) -> int:
        """The capacity of an engine's pool, in blocks of tokens."""
        return int(self.pool_bytes / self.model.token_bytes / BLOCK_TOKENS)

    def pace(self, costs: GpuCosts) -> Pace:
        """The pace that its engines report, with full steps."""
        layers, layer_bytes = self.model.num_layers, PAGE * self.model.layer_bytes
        step_s = self.model_s + layers * (costs.hand_over_s + costs.append.fixed_s)
        return Pace(
            page_s=PAGE * step_s / self.chunk + layers * layer_bytes / costs.append.per_s,
            pair_s=layers * PAGE**2 * self.model.pair_flops / costs.prefill.per_s,
            read_s=layers * layer_bytes / costs.decode.per_s,
        )


@dataclass(slots=True, eq=False)
class Running:
    """A request: its moments in seconds, and how many of its prompt's tokens were cached."""

    request: TraceRequest
    begun: float
    own: int = 0
    cached: int = 0
    done: int = 0
    first: float = 0.0
    ended: float = 0.0

    @property
    def first_s(self) -> float:
        return self.first - self.begun

    @property
    def answer_s(self) -> float:
        """Seconds of the tokens after the first one."""
        return self.ended - self.first


@dataclass(slots=True)
class FleetRun:
    """The outcome of a run.

    `busy_s`: the sum of all engines' steps. `steps_s`: steps of every sixteenth engine.
    """

    outcomes: list[Running] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    refused: int = 0


class Engine:
    """One engine, which runs step after step while it has requests."""

    def __init__(self, number: int, fleet: Fleet, costs: GpuCosts, placing: Placing) -> None:
        self.number = number
        self.fleet, self.costs, self.placing = fleet, costs, placing
        self.pool = BlockPool(fleet.blocks)
        self.waiting: deque[Running] = deque()
        self.prefilling: deque[Running] = deque()
        self.ending: list[tuple[int, int, Running]] = []
        self.context = 0
        self.step = 0
        self.is_stepping = False

    def admit(self, now: float) -> None:
        """Admit waiting requests, as far as pages suffice."""
        while self.waiting:
            one = self.waiting[0]
            blocks = one.request.blocks
            cached = self.pool.match(blocks)
            one.own = -(-one.request.output // BLOCK_TOKENS)
            evicted = self.pool.hold(blocks, one.own)
            if evicted is None:
                break
            self.waiting.popleft()
            one.cached = one.done = min(cached * BLOCK_TOKENS, one.request.tokens - 1)
            self.placing.took(self.number, blocks, evicted, self.pool.num_held, now - one.begun)
            self.prefilling.append(one)
        self.placing.waits(self.number, now - self.waiting[0].begun if self.waiting else 0.0)

    def step_s(self) -> float:
        """Seconds of the next step: the model, and attention of decodes and of a prefill piece."""
        fleet, costs, model = self.fleet, self.costs, self.fleet.model
        layer_s = costs.hand_over_s
        if self.ending:
            layer_s += costs.decode.seconds(self.context * model.layer_bytes)
        pairs, rows = 0.0, 0
        for one in self.prefilling:
            now = min(fleet.chunk - rows, one.request.tokens - one.done)
            pairs += now * (one.done + now / 2)
            rows += now
            if rows == fleet.chunk:
                break
        if rows:
            layer_s += costs.prefill.seconds(pairs * model.pair_flops)
            layer_s += costs.append.seconds(rows * model.layer_bytes)
        return fleet.model_s + model.num_layers * layer_s

    def end_step(self, now: float, over: Callable[[Running], None]) -> None:
        """Account a step: a token for every decode, and a piece of the prompts."""
        self.step += 1
        self.context += len(self.ending)
        while self.ending and self.ending[0][0] <= self.step:
            one = heappop(self.ending)[2]
            self.context -= one.request.tokens + one.request.output
            self.pool.release(one.request.blocks, one.own)
            self.placing.holds(self.number, self.pool.num_held)
            over(one)
        left = self.fleet.chunk
        while self.prefilling and left:
            one = self.prefilling[0]
            now_done = min(left, one.request.tokens - one.done)
            one.done += now_done
            left -= now_done
            if one.done < one.request.tokens:
                break
            self.prefilling.popleft()
            one.first = now
            self.context += one.request.tokens
            heappush(self.ending, (self.step + one.request.output, id(one), one))


class Clock:
    """Runs actions in order of time; actions of the same time in the order of their scheduling."""

    __slots__ = ("_due", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._due, (when, self._number, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self) -> None:
        while self._due:
            self.now, _, act = heappop(self._due)
            act()


class Simulation:
    """Requests over a fleet."""

    def __init__(self, fleet: Fleet, costs: GpuCosts) -> None:
        self.clock = Clock()
        self.fleet = fleet
        self.placing = Placing(fleet.engines, fleet.blocks, fleet.pace(costs))
        self.engines = [
            Engine(number, fleet, costs, self.placing) for number in range(fleet.engines)
        ]
        self.result = FleetRun()

    def run(self, requests: Sequence[TraceRequest]) -> FleetRun:
        """All requests, in order of time."""
        self.schedule(iter(requests))
        self.clock.run()
        return self.result

    def schedule(self, requests: Iterator[TraceRequest]) -> None:
        """Schedule the arrival of the next request, which schedules the one after it."""
        request = next(requests, None)
        if request is not None:
            self.clock.at(request.at, lambda: self.arrive(request, requests))

    def arrive(self, request: TraceRequest, later: Iterator[TraceRequest]) -> None:
        self.place(request)
        self.schedule(later)

    def place(self, request: TraceRequest) -> None:
        now = self.clock.now
        one = Running(request, now)
        if len(request.blocks) + 1 > self.fleet.blocks:
            self.result.refused += 1
            return
        engine = self.engines[self.placing.place(request.blocks, now)]
        self.clock.after(self.fleet.router_s, lambda: self.receive(engine, one))

    def receive(self, engine: Engine, one: Running) -> None:
        engine.waiting.append(one)
        if not engine.is_stepping:
            self.begin_step(engine)

    def begin_step(self, engine: Engine) -> None:
        engine.admit(self.clock.now)
        engine.is_stepping = bool(engine.prefilling or engine.ending)
        if not engine.is_stepping:
            return
        step_s = engine.step_s()
        self.result.busy_s += step_s
        if engine.number % 16 == 0:
            self.result.steps_s.append(step_s)
        self.clock.after(step_s, lambda: self.end_step(engine))

    def end_step(self, engine: Engine) -> None:
        engine.end_step(self.clock.now, self.over)
        self.begin_step(engine)

    def over(self, one: Running) -> None:
        one.ended = self.clock.now
        self.result.outcomes.append(one)
