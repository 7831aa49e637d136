"""Runs seeds until one fails, shrinks that run, and counts what was reached."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Final

from tests.world.cluster import ClusterWorld
from tests.world.disk import DiskWorld
from tests.world.simulation import Plan, Result, Simulation
from tests.world.world import World

PROGRESS_S: Final = 10.0
SHRINK_RUNS: Final = 80
KIND_CHARS: Final = 24
"""Errors that begin with the same text are taken for the same."""
AT_ONCE: Final = 4
"""Seeds that wait for each process."""


WORLDS: Final[dict[str, type[Simulation] | type[DiskWorld]]] = {
    "engine": World,
    "cluster": ClusterWorld,
    "disk": DiskWorld,
}


def run(plan: Plan) -> Result:
    return WORLDS[plan.world](plan).run()


@dataclass(slots=True)
class Totals:
    """What all runs did together."""

    seeds: int = 0
    seconds: float = 0.0
    rounds: int = 0
    calls: int = 0
    unclear: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    began: float = field(default_factory=time.perf_counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.seconds += result.seconds
        self.rounds += result.rounds
        self.calls += result.calls
        self.unclear += result.is_unclear
        self.faults += result.faults
        self.coverage += result.coverage

    def line(self) -> str:
        spent = time.perf_counter() - self.began
        pairs = sum(1 for _, what in self.coverage if what in self.faults)
        return (
            f"{self.seeds} seeds ({self.unclear} given up), {self.seeds / spent:.1f}/s; "
            f"{self.seconds:.0f} s simulated, "
            f"{self.seconds / spent:.1f}/s; {self.rounds} rounds, {self.calls} calls; "
            f"{len(self.faults)} faults, {pairs} pairs of operation and fault"
        )

    def table(self) -> str:
        """Operations and faults, as Markdown: answers to calls during which the fault happened."""
        faults = sorted(self.faults)
        lines = ["| operation | answered | " + " | ".join(faults) + " |"]
        lines.append("|---|" + "---|" * (len(faults) + 1))
        for name in sorted({name for name, _ in self.coverage}):
            codes = [what for one, what in self.coverage if one == name and what not in faults]
            answered = sum(self.coverage[name, code] for code in codes)
            counts = [self.coverage[name, fault] for fault in faults]
            cells = " | ".join(str(count) for count in (answered, *counts))
            lines.append(f"| `{name}` | {cells} |")
        return "\n".join(lines)


def results(plans: Iterable[Plan], jobs: int) -> Iterator[Result]:
    """The results of plans, each as soon as it is there."""
    if jobs == 1:
        yield from map(run, plans)
        return
    with ProcessPoolExecutor(jobs) as pool:
        todo, running = iter(plans), set[Future[Result]]()
        try:
            while True:
                for plan in todo:
                    running.add(pool.submit(run, plan))
                    if len(running) >= AT_ONCE * jobs:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    yield one.result()
        finally:
            for one in running:
                one.cancel()


def search(
    plans: Iterable[Plan], jobs: int, budget_s: float = float("inf")
) -> tuple[Totals, Result | None]:
    """Run plans until one fails, or for `budget_s` seconds."""
    totals, shown = Totals(), time.perf_counter()
    for result in results(plans, jobs):
        totals.add(result)
        if result.error is not None:
            return totals, result
        now = time.perf_counter()
        if now - shown > PROGRESS_S:
            shown = now
            print(totals.line(), file=sys.stderr, flush=True)
        if now - totals.began > budget_s:
            break
    return totals, None


def shrink(failed: Result) -> Result:
    """A shorter run with the same error: fewer statements, then without faults if possible."""
    best, runs = failed, 0

    def fails(plan: Plan) -> bool:
        nonlocal best, runs
        if runs >= SHRINK_RUNS:
            return False
        runs += 1
        result = run(plan)
        same = (result.error or "")[:KIND_CHARS] == (failed.error or "")[:KIND_CHARS]
        if same:
            best = result
        return same

    fails(replace(best.plan, faults=False))
    while best.plan.statements > 1 and fails(
        replace(best.plan, statements=best.plan.statements * 2 // 3)
    ):
        pass
    whole = best.plan.statements * best.plan.callers
    size = max(1, whole // 4)
    while size and runs < SHRINK_RUNS:
        for begin in range(0, whole, size):
            chunk = frozenset(range(begin, begin + size))
            if not chunk <= best.plan.skipped:
                fails(replace(best.plan, skipped=best.plan.skipped | chunk))
        size //= 2
    return best


def command(plan: Plan) -> str:
    """The command that repeats a run."""
    words = [f"python -m tests.world --world {plan.world} --seed {plan.seed}"]
    words.append(f"--statements {plan.statements}")
    if not plan.faults:
        words.append("--no-faults")
    if plan.skipped:
        words.append("--skip " + ",".join(map(str, sorted(plan.skipped))))
    return " ".join(words)
