"""Bugs put back: a patch makes each of them again, in a copy of the code, and seeds find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PATCHES: Final = Path(__file__).resolve().parent / "bugs"
PATCH: Final = ("patch", "--silent", "--force", "-p1")
COPIED: Final = ("service", "config", "kernels", "client/src", "tests")


def names() -> list[str]:
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def applies(name: str) -> bool:
    """Whether a patch still fits the code."""
    return subprocess.run([*PATCH, "--dry-run", "-i", path_of(name)], cwd=ROOT).returncode == 0


def world_of(name: str) -> str:
    """The world that has to find a patch: its file may begin with `World: NAME`."""
    first = Path(path_of(name)).read_text().partition("\n")[0]
    return first.removeprefix("World: ") if first.startswith("World: ") else "engine"


def path_of(name: str) -> str:
    return str(PATCHES / f"{name}.patch")


def find(name: str, args: list[str]) -> int:
    """Run seeds on a copy of the code with the bug; the exit status is 1 once it is found."""
    with tempfile.TemporaryDirectory(prefix="attnd-bug-") as folder:
        copy = Path(folder)
        for part in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        subprocess.run([*PATCH, "-i", path_of(name)], cwd=copy, check=True)
        paths = os.pathsep.join((str(copy), str(copy / "client/src"), str(copy / "tests")))
        ran = subprocess.run(
            [sys.executable, "-m", "tests.world", *args],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": paths},
        )
        return ran.returncode
