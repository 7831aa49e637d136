"""Runs seeds until one fails, shrinks that run, and counts what was reached."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Final

from tests.world.cluster import ClusterWorld
from tests.world.disk import DiskWorld
from tests.world.simulation import Plan, Result, Simulation
from tests.world.world import World

PROGRESS_S: Final = 10.0
SHRINK_RUNS: Final = 80
KIND_CHARS: Final = 24
"""Errors that begin with the same text are taken for the same."""
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "deaths": ("caller dies", "door dies", "engine dies", "device lost"),
    "stalls": ("engine stalls", "engine stalls long"),
    "network": (
        *("partial send", "short read", "frames lost", "connection breaks"),
        "caller stops reading",
    ),
    "device": ("kernel fails", "launch fails", "no memory", "unsupported"),
    "drains": ("engine drains", "engine is emptied", "emptying ends"),
    "cancelled": ("caller cancels",),
    "keys": ("key file breaks",),
    "disk": (
        *("disk fails to read", "disk fails to sync", "disk flips a bit", "disk is full"),
        *("disk lies about a sync", "disk reads short", "disk writes short"),
    ),
}
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
        """Operations and kinds of faults, as Markdown: calls during which a fault happened."""
        lines = ["| operation | answered | " + " | ".join(KINDS) + " |"]
        lines.append("|---|" + "---|" * (len(KINDS) + 1))
        for name in sorted({name for name, _ in self.coverage}):
            of = {what: count for (one, what), count in self.coverage.items() if one == name}
            hits = [sum(of.get(fault, 0) for fault in faults) for faults in KINDS.values()]
            answered = sum(count for what, count in of.items() if what not in self.faults)
            lines.append(f"| `{name}` | {answered} | " + " | ".join(map(str, hits)) + " |")
        lines.append(
            "\n" + "; ".join(f"{name} {self.faults[name]}" for name in sorted(self.faults))
        )
        missed = sorted(named_faults() - self.faults.keys())
        lines.append(f"\nNamed faults that were not reached: {', '.join(missed) or 'none'}.")
        return "\n".join(lines)


def named_faults() -> set[str]:
    """The names of all fault points of the worlds, from their source."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    return {name for text in texts for name in re.findall(r'fault\(\s*"([^"]+)"', text)}


def results(plans: Iterable[Plan], jobs: int) -> Iterator[Result]:
    """The results of plans, each as soon as it is there."""
    if jobs == 1:
        yield from map(run, plans)
    else:
        with Pool(jobs) as pool:
            yield from pool.imap_unordered(run, plans)


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
        left = set(range(plan.statements * plan.callers)) - plan.skipped
        words.append("--only " + ",".join(map(str, sorted(left))))
    return " ".join(words)
