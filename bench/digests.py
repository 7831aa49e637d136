"""Digests of what a row's measurement is of: machine code, sources and work arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.cubin import MachineCode, machine_code
from bench.launches import Machine, RowLaunches
from bench.recorder import Launched
from bench.sources import source_digest
from kernels.compile import DEFAULT_CACHE, SOURCES, compile_cached


def machine_of(run: dict[str, Any]) -> Machine:
    """What decided what was launched in a run."""
    return Machine(run["arch"], run["multiprocessors"])


def digests_of(
    launches: RowLaunches, machine: Machine, sources: Path = SOURCES, cache: Path = DEFAULT_CACHE
) -> dict[str, Any]:
    """What a row's measurement is of: its work arrays, and each kernel's source and machine code.

    Machine code is told for each release of the compiler that made it.
    """
    kernels = {}
    for name, launched in launches.kernels.items():
        code = code_of(launched, machine, sources, cache)
        kernels[name] = {
            "source": source_digest(launched.spec, machine.arch, sources),
            "code": {code.release: code.digest},
        }
    return {"work": launches.work_digest, "kernels": kernels}


def code_of(launched: Launched, machine: Machine, sources: Path, cache: Path) -> MachineCode:
    """A kernel's machine code as the compiler at hand makes it."""
    compiled = compile_cached(launched.spec, machine.arch, cache, sources)
    return machine_code(compiled.cubin, launched.entry)
