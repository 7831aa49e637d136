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
COPIED: Final = ("service", "config", "kernels", "client/src", "tests")


def names() -> list[str]:
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def find(name: str, args: list[str]) -> int:
    """Run seeds on a copy of the code with the bug; the exit status is 1 once it is found."""
    with tempfile.TemporaryDirectory(prefix="attnd-bug-") as folder:
        copy = Path(folder)
        for part in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        patch = ["patch", "--silent", "-p1", "-i", str(PATCHES / f"{name}.patch")]
        subprocess.run(patch, cwd=copy, check=True)
        paths = os.pathsep.join((str(copy), str(copy / "client/src"), str(copy / "tests")))
        ran = subprocess.run(
            [sys.executable, "-m", "tests.world", *args],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": paths},
        )
        return ran.returncode
