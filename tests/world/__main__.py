"""`python -m tests.world`: run seeds, replay one, or find a bug that was put back."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of the run
    env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]], env)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.world.search import PATCHES, WORLDS, command, find, run, search, shrink
from tests.world.simulation import Plan


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="longest time")
    bugs = (*PATCHES, "all")
    parser.add_argument("--bug", choices=bugs, metavar="BUG", help="of tests/world/bugs, or `all`")
    worlds = (*WORLDS, "all")
    parser.add_argument("--world", default="all", choices=worlds, help="(default: all)")
    parser.add_argument("--table", action="store_true", help="print operations and faults")
    parser.add_argument("--seed", type=int, help="replay this one in each world, with its trace")
    parser.add_argument("--statements", type=int, default=40, help="of each caller")
    parser.add_argument("--only", help="numbers of the statements to run, of all callers")
    parser.add_argument("--most", type=int, default=1, help="number of failures to stop at")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    worlds = list(WORLDS) if given.world == "all" else [given.world]
    if given.bug:
        args = [f"--seeds={given.seeds}", f"--first={given.first}", f"--jobs={given.jobs}"]
        args += [] if given.world == "all" else ["--world", given.world]
        bugs = PATCHES if given.bug == "all" else [given.bug]
        missed = [name for name in bugs if not find(name, args)]
        if missed:
            print("not found:", *missed)
        return bool(missed)
    if given.seed is not None:
        skipped = frozenset[int]()
        if given.only is not None:
            skipped = frozenset(range(4 * given.statements)) - {*map(int, given.only.split(","))}
        has_faults, errors = not given.no_faults, list[str | None]()
        for name in worlds:
            result = run(Plan(given.seed, 4, given.statements, has_faults, skipped, name))
            print(*result.trace, sep="\n")
            print(f"seed {given.seed}: {result.error or 'ok'}; digest {result.digest}")
            errors.append(result.error)
        return any(errors)
    seeds = range(given.first, given.first + given.seeds)
    plans = (Plan(seed, statements=given.statements, world=one) for seed in seeds for one in worlds)
    totals, failed = search(plans, given.jobs, given.budget_s, given.most)
    print(totals.line())
    if given.table:
        print(totals.table())
    for one in failed:
        print(f"seed {one.plan.seed} failed, of {totals.sums['seeds']} that ran: {one.error}")
        print(f"replay: {command(one.plan)}", flush=True)
        if not given.no_shrink:
            best = shrink(one)
            print(f"shorter: {command(best.plan)}")
            print(*best.trace[-12:], sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
