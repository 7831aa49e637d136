"""The import path and the command lines of the service's processes.

`service`, `kernels` and `config` are names that other programs use too. A distribution must not
install them at top level: it has them inside `attnd_service`. This module puts the folder that
holds them first on the import path, in the service's own processes only. A `config.py` in the
working directory or in site-packages is therefore never imported in their place.

Run as a script with the name of a module, it starts a process of the service.
"""

from __future__ import annotations

import builtins
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

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


INSIDE: Final = "attnd_service"
"""The package with the service's packages where a program has modules of their names."""
PACKAGES: Final = ("service", "kernels", "config")


def import_inside(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` for modules of `attnd_service`: the service's own names are inside it."""
    top = name.partition(".")[0]
    if level or top not in PACKAGES:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    found = builtins.__import__(f"{INSIDE}.{name}", globals, locals, fromlist or (), 0)
    return found if fromlist else getattr(found, top)


class InsideLoader(SourceFileLoader):
    """Loads a module whose import statements are `import_inside`."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": import_inside}
        super().exec_module(module)


class InsideFinder:
    """Finds the modules of `attnd_service` as the other finders do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{INSIDE}."):
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = InsideLoader(spec.loader.name, spec.loader.path)
        return spec


def import_beside_others() -> None:
    """Have the service imported as `attnd_service.service`, for a program that runs its own code in
    this process: its `import config` goes on to find its own module."""
    if not any(isinstance(one, InsideFinder) for one in sys.meta_path):
        sys.meta_path.insert(0, InsideFinder())


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
