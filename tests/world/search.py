"""Runs seeds until one fails, shrinks that run, counts what was reached, and puts bugs back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any, Final

from tests.world.cluster import ClusterWorld
from tests.world.disk import DiskWorld
from tests.world.simulation import Plan, Result
from tests.world.threads import ThreadWorld
from tests.world.world import World

ROOT: Final = Path(__file__).resolve().parents[2]
PATCHES: Final = {path.stem: path for path in sorted((ROOT / "tests/world/bugs").glob("*.patch"))}
PATCH: Final = ("patch", "--silent", "--force", "-p1")
COPIED: Final = ("service", "config", "kernels", "client/src", "tests")
PROGRESS_S: Final = 10.0
SHRINK_RUNS: Final = 80
KIND_CHARS: Final = 24  # errors that begin with the same text are taken for the same
KINDS: Final = {
    "deaths": "caller dies, door dies, engine dies, device lost, power is lost",
    "stalls": "engine stalls, engine stalls long",
    "network": "partial send, short read, frames lost, connection breaks, caller stops reading",
    "device": "kernel fails, launch fails, no memory, unsupported",
    "drains": "engine drains, engine is emptied, emptying ends",
    "cancelled": "caller cancels",
    "keys": "key file breaks, a key is revoked",
    "disk": "disk fails to read, disk fails to sync, disk flips a bit, disk is full, "
    "disk lies about a sync, disk reads short, disk writes short",
}
"""Columns of the table, and the faults that each counts."""
WORLDS: Final = {
    "engine": World,
    "cluster": ClusterWorld,
    "threads": ThreadWorld,
    "disk": DiskWorld,
}


def run(plan: Plan) -> Result:
    return WORLDS[plan.world](plan).run()


class Totals:
    """What all runs did together."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.sums: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.coverage: Counter[tuple[str, str]] = Counter()

    def add(self, result: Result) -> None:
        names = ("seconds", "rounds", "calls", "unclear")
        self.sums.update(seeds=1, **{name: getattr(result, name) for name in names})
        self.faults += result.faults
        self.coverage += result.coverage

    def line(self) -> str:
        spent = time.perf_counter() - self.began
        pairs = sum(1 for _, what in self.coverage if what in self.faults)
        sums = self.sums
        return (
            f"{sums['seeds']} seeds ({sums['unclear']} given up), {sums['seeds'] / spent:.1f}/s; "
            f"{sums['seconds']:.0f} s simulated, {sums['seconds'] / spent:.1f}/s; "
            f"{sums['rounds']} rounds, {sums['calls']} calls; "
            f"{len(self.faults)} faults, {pairs} pairs of operation and fault"
        )

    def table(self) -> str:
        """Operations and kinds of faults, as Markdown: calls during which a fault happened."""
        lines = ["| operation | answered | " + " | ".join(KINDS) + " |"]
        lines.append("|---|" + "---|" * (len(KINDS) + 1))
        for name in sorted({name for name, _ in self.coverage}):
            of = {what: count for (one, what), count in self.coverage.items() if one == name}
            hits = [sum(of.get(one, 0) for one in some.split(", ")) for some in KINDS.values()]
            answered = sum(count for what, count in of.items() if what not in self.faults)
            lines.append(f"| `{name}` | {answered} | " + " | ".join(map(str, hits)) + " |")
        reached = "; ".join(f"{name} {self.faults[name]}" for name in sorted(self.faults))
        texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
        named = {name for text in texts for name in re.findall(r'fault\(\s*"([^"]+)"', text)}
        missed = ", ".join(sorted(named - self.faults.keys())) or "none"
        return "\n".join(
            [*lines, "", reached, "", f"Named faults that were not reached: {missed}."]
        )


def search(
    plans: Iterable[Plan], jobs: int, budget_s: float = float("inf"), most: int = 1
) -> tuple[Totals, list[Result]]:
    """Run plans until `most` have failed, or for `budget_s` seconds."""
    totals, failed = Totals(), list[Result]()
    shown = totals.began
    with Pool(jobs) if jobs > 1 else nullcontext() as pool:
        for result in map(run, plans) if pool is None else pool.imap_unordered(run, plans):
            totals.add(result)
            failed += [result] if result.error is not None else []
            if len(failed) == most:
                break
            now = time.perf_counter()
            if now - shown > PROGRESS_S:
                shown = now
                print(totals.line(), file=sys.stderr, flush=True)
            if now - totals.began > budget_s:
                break
    return totals, failed


def shrink(failed: Result) -> Result:
    """A shorter run with the same error: fewer statements, then without faults if possible."""
    best, runs = failed, 0

    def fails(**changed: Any) -> bool:
        nonlocal best, runs
        if runs >= SHRINK_RUNS:
            return False
        runs += 1
        result = run(replace(best.plan, **changed))
        same = (result.error or "")[:KIND_CHARS] == (failed.error or "")[:KIND_CHARS]
        if same:
            best = result
        return same

    fails(faults=False)
    while best.plan.statements > 1 and fails(statements=best.plan.statements * 2 // 3):
        pass
    whole = best.plan.statements * best.plan.callers
    size = max(1, whole // 4)
    while size and runs < SHRINK_RUNS:
        for begin in range(0, whole, size):
            chunk = frozenset(range(begin, begin + size))
            if not chunk <= best.plan.skipped:
                fails(skipped=best.plan.skipped | chunk)
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


def applies(name: str) -> bool:
    """Whether a patch still fits the code."""
    return subprocess.run([*PATCH, "--dry-run", "-i", PATCHES[name]], cwd=ROOT).returncode == 0


def find(name: str, args: list[str]) -> bool:
    """Whether seeds fail on a copy of the code with the bug; `args` are more of the command's. The
    world is the one that the patch names in its first line (`World: NAME`), else `engine`."""
    first = PATCHES[name].read_text().partition("\n")[0]
    world = first.removeprefix("World: ") if first.startswith("World: ") else "engine"
    print(f"{name}:", flush=True)
    command = [sys.executable, "-m", "tests.world", "--no-shrink", "--world", world, *args]
    with tempfile.TemporaryDirectory(prefix="attnd-bug-") as folder:
        copy = Path(folder)
        for part in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        subprocess.run([*PATCH, "-i", PATCHES[name]], cwd=copy, check=True)
        paths = os.pathsep.join(map(str, (copy, copy / "client/src", copy / "tests")))
        env = os.environ | {"PYTHONPATH": paths}
        return subprocess.run(command, cwd=copy, env=env).returncode == 1
