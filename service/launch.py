"""The import path and the command lines of the service's processes.

`service`, `kernels` and `config` are names that other programs use too. A distribution must not
install them at top level: it has them inside `attnd_service`. This module puts the folder that
holds them first on the import path, in the service's own processes only. A `config.py` in the
working directory or in site-packages is therefore never imported in their place.

Run as a script with the name of a module, it starts a process of the service.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parents[1]
"""The folder with the packages `service`, `kernels` and `config`: the root of a clone, or
`attnd_service` in site-packages."""


def command_of(module: str) -> tuple[str, ...]:
    """The command line that runs a module of the service as a process, from any directory."""
    return (sys.executable, "-P", str(HOME / "service/launch.py"), module)


def import_from_home() -> None:
    """Put the service's packages first on the import path of this process.

    In a clone the package `attnd`, whose wire formats the service uses, is that of the clone.
    """
    client = HOME / "client/src"
    paths = [str(HOME), *([str(client)] if client.is_dir() else [])]
    if sys.path[: len(paths)] != paths:
        sys.path[:0] = paths


def hold_hang_ups() -> None:
    """Keep a SIGHUP, which ends a process by default, until the supervisor handles it: a reload may
    follow a start at once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def run_module() -> None:
    """Run the module that the first argument names, as `python -m` does."""
    import_from_home()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_module()
