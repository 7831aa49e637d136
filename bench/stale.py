"""Says which rows of the kernels' results are no longer of the kernels there are.

    python -m bench.stale [FILE] [--strict] [--record]

One line for a row whose digests do not hold, with the reason; nothing when all hold. Needs no GPU.
`--strict` exits with 1 when there are such rows. `--record` gives the rows that hold the digests of
the sources at hand, and of what the compiler at hand makes of them, to judge later changes by.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.digests import code_of, digests_of, machine_of
from bench.kernel_results import KERNEL_RESULTS, Results, read_results, run_of
from bench.launches import Machine, RowLaunches, row_launches
from bench.machine import workloads, write_results
from bench.sources import source_digest
from kernels.compile import DEFAULT_CACHE, SOURCES


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the results beside what the kernels at hand launch for it."""

    digests: dict[str, Any]
    launches: RowLaunches
    machine: Machine


def stale_rows(
    results: Results, sources: Path = SOURCES, cache: Path = DEFAULT_CACHE
) -> dict[str, str]:
    """Why a row's figures are not of `sources` and the planner at hand, by the row's name.

    A row of workloads.json without a result is stale too.
    """
    workload = {row["name"]: row for row in workloads()}
    results_of = {row["name"]: row for row in results["rows"]}
    told = {}
    for name in [*workload, *(name for name in results_of if name not in workload)]:
        if name not in results_of:
            reasons = ["never measured"]
        elif name not in workload:
            reasons = ["workloads.json has no such row"]
        elif "digests" not in results_of[name]:
            reasons = ["never measured with a digest"]
        else:
            row = measured(results, results_of[name], workload[name])
            reasons = list(changes(row, sources, cache))
        if reasons:
            told[name] = "; ".join(reasons)
    return told


def measured(results: Results, result: dict[str, Any], workload: dict[str, Any]) -> Measured:
    """A row with digests, and what is launched for it now."""
    machine = machine_of(run_of(results, result))
    return Measured(result["digests"], row_launches(workload, machine), machine)


def changes(row: Measured, sources: Path, cache: Path) -> Iterator[str]:
    """What is not as it was when the row was measured."""
    if row.digests["work"] != row.launches.work_digest:
        yield "work arrays changed"
    was, now = row.digests["kernels"], row.launches.kernels
    for name in sorted(was.keys() - now.keys()):
        yield f"no longer runs {name}"
    for name in sorted(now.keys() - was.keys()):
        yield f"now runs {name}"
    for name in sorted(was.keys() & now.keys()):
        launched = now[name]
        if was[name]["source"] == source_digest(launched.spec, row.machine.arch, sources):
            continue  # the same source needs no compiler to tell
        code, known = code_of(launched, row.machine, sources, cache), was[name]["code"]
        if code.release not in known:
            releases = ", ".join(sorted(known))
            yield (
                f"source of {name} changed, and its machine code is on record of "
                f"NVRTC {releases}, not of {code.release}"
            )
        elif known[code.release] != code.digest:
            yield f"machine code of {name} changed"


def recorded(
    results: Results, stale: dict[str, str], sources: Path = SOURCES, cache: Path = DEFAULT_CACHE
) -> Results:
    """The results with the digests of now, beside those of other compilers, on rows that hold."""
    workload = {row["name"]: row for row in workloads()}
    rows = []
    for result in results["rows"]:
        if result["name"] not in stale:
            row = measured(results, result, workload[result["name"]])
            now = digests_of(row.launches, row.machine, sources, cache)
            for name, kernel in now["kernels"].items():
                was = row.digests["kernels"][name]
                if was["source"] == kernel["source"]:
                    kernel["code"] = was["code"] | kernel["code"]
            result = result | {"digests": now}
        rows.append(result)
    return results | {"rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=KERNEL_RESULTS, help="the results")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a row is stale")
    parser.add_argument("--record", action="store_true", help="add this compiler's digests")
    arguments = parser.parse_args()
    results = read_results(arguments.file)
    stale = stale_rows(results)
    for name, why in stale.items():
        print(f"{name}: {why}")
    if arguments.record:
        write_results(arguments.file, recorded(results, stale))
    return int(arguments.strict and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
