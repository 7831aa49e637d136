"""`python -m tests.world`: run seeds, replay one, or find a bug that was put back."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def arguments() -> argparse.Namespace:
    from tests.world import put_back

    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="longest time")
    bugs = (*put_back.names(), "all")
    parser.add_argument("--bug", choices=bugs, metavar="BUG", help="of tests/world/bugs, or `all`")
    worlds = ("engine", "cluster", "disk", "all")
    parser.add_argument("--world", default="all", choices=worlds, help="(default: all)")
    parser.add_argument("--table", action="store_true", help="print operations and faults")
    parser.add_argument("--seed", type=int, help="replay this one, with its trace")
    parser.add_argument("--statements", type=int, default=40, help="of each caller")
    parser.add_argument("--only", help="numbers of the statements to run, of all callers")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    return parser.parse_args()


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of the run
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]], env)
    given = arguments()
    from tests.world import put_back

    if given.bug:
        missed = []
        for name in put_back.names() if given.bug == "all" else [given.bug]:
            print(f"{name}:", flush=True)
            world = put_back.world_of(name) if given.world == "all" else given.world
            args = ["--no-shrink", "--seeds", str(given.seeds), "--jobs", str(given.jobs)]
            args += ["--world", world]
            if not put_back.find(name, [*args, "--first", str(given.first)]):
                missed.append(name)
        if missed:
            print("not found:", *missed)
        return bool(missed)
    from tests.world.search import WORLDS, command, run, search, shrink
    from tests.world.simulation import Plan

    worlds = list(WORLDS) if given.world == "all" else [given.world]

    if given.seed is not None:
        skipped, faults = frozenset[int](), not given.no_faults
        if given.only is not None:
            skipped = frozenset(range(4 * given.statements)) - {*map(int, given.only.split(","))}
        plan = Plan(given.seed, 4, given.statements, faults, skipped, worlds[0])
        result = run(plan)
        print(*result.trace, sep="\n")
        print(f"seed {plan.seed}: {result.error or 'ok'}; digest {result.digest}")
        return result.error is not None
    seeds = range(given.first, given.first + given.seeds)
    plans = (Plan(seed, statements=given.statements, world=one) for seed in seeds for one in worlds)
    totals, failed = search(plans, given.jobs, given.budget_s)
    print(totals.line())
    if given.table:
        print(totals.table())
    if failed is None:
        return 0
    print(f"seed {failed.plan.seed} failed, the {totals.seeds}th that ran: {failed.error}")
    print(f"replay: {command(failed.plan)}", flush=True)
    if given.no_shrink:
        return 1
    best = shrink(failed)
    print(f"shorter: {command(best.plan)}")
    print(*best.trace[-12:], sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
