"""Mutation testing: does a test fail when one expression of a package is wrong?

`python -m tests.mutants core` writes mutants of `service/core` into the folder `mutants`, takes a
random sample, and runs for each mutant the tests that reach its function. Mutants that survive the
package's own tests then meet the tests of other folders that reach it, and seeds of the world that
it runs in. Survivors are printed as diffs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import mutmut.__main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code

HOST = "tests/cuda/host/test_"
CLUSTER = [f"tests/cluster/{name}" for name in ("placement", "routing", "membership")]
PACKAGES = {  # the folder that is mutated; its own tests; other tests; its world
    "core": ("service/core", ["tests/core"], ["tests/engine/handlers"], "engine"),
    "handlers": (
        "service/engine/handlers",
        ["tests/engine/handlers"],
        ["tests/engine/loop", "tests/engine/store", "tests/engine/tiers"],
        "engine",
    ),
    "routing": ("service/cluster/routing", ["tests/cluster/routing"], CLUSTER, "cluster"),
    "placement": ("service/cluster/placement", ["tests/cluster/placement"], CLUSTER, "cluster"),
    "plan": (
        "kernels/cuda/plan",
        [
            f"{HOST}{name}.py"
            for name in ("planner", "plan_decisions", "rounds", "wide", "wide_masks")
        ],
        [f"{HOST}{name}.py" for name in ("attention_launches", "kernel_sets")],
        None,
    ),
}
NUM_SEEDS: Final = {"engine": 100, "cluster": 20}
SEEDS_S: Final = 600.0
"""Maximum time for the seeds; a mutant that needs longer hangs."""
KILLED = ("killed", "timeout", "segfault")


def write_mutants(folder: str) -> list[str]:
    """Writes the mutants of `folder`, and returns their names."""
    config().only_mutate = [f"{folder}/*"]
    # The wording of errors is no behaviour: strings stay as they are.
    mutation_operators[:] = [pair for pair in mutation_operators if pair[1] is not operator_string]
    shutil.rmtree("mutants", ignore_errors=True)
    Path("mutants").mkdir()
    with mutmut.CatchOutput():
        mutmut.copy_src_dir()
        mutmut.create_mutants(1)
    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=[])
    return sorted(name for _, name, _ in found)


def quick_first(
    runner: PytestRunner,
    tests: Iterable[str],
    arguments: Any = PytestRunner._pytest_args_regular_run,
) -> list[str]:
    """Arguments of pytest: most mutants are killed by a test that starts no process."""
    took = state().duration_by_test
    found: list[str] = arguments(runner, sorted(tests, key=lambda test: took.get(test, 0.0)))
    return found


def survivors(names: list[str], tests: list[str]) -> list[str]:
    """The `names` that no test of `tests` notices."""
    if not names or not tests:
        return names
    config().pytest_add_cli_args_test_selection = tests
    PytestRunner._pytest_args_regular_run = quick_first
    mutmut._run(names, 1)
    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=names)
    return sorted(name for _, name, code in found if status_by_exit_code[code] not in KILLED)


def passes_world(name: str, world: str) -> bool:
    """Whether the first seeds of `world` pass with a mutant; without one if `name` is empty."""
    seeds = ["--world", world, "--seeds", str(NUM_SEEDS[world]), "--no-shrink"]
    env = os.environ | {"MUTANT_UNDER_TEST": name}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.world", *seeds],
            cwd="mutants",
            env=env,
            capture_output=True,
            timeout=SEEDS_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Test the tests of one package with mutants")
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--sample", type=int, default=100, help="Number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="Chooses the sample")
    parser.add_argument("--only", nargs="+", help="Names of the mutants to run")
    options = parser.parse_args()
    folder, own_tests, other_tests, world = PACKAGES[options.package]
    names = write_mutants(folder)
    chosen = random.Random(options.seed).sample(names, min(options.sample, len(names)))
    chosen = options.only or chosen
    alive = survivors(survivors(chosen, own_tests), other_tests)
    if alive and world is not None:
        if not passes_world("", world):
            raise RuntimeError(f"a seed of {world} fails without a mutant: fix that first")
        alive = [name for name in alive if passes_world(name, world)]
    for name in alive:
        print(mutmut.get_diff_for_mutant(name, path=mutmut.find_mutant(name).path))
    killed = len(chosen) - len(alive)
    share = f"{killed} of {len(chosen)} killed ({killed / len(chosen):.1%})"
    print(f"{options.package}: {share}, of {len(names)} mutants")


if __name__ == "__main__":
    main()
