"""Tests with the oldest and the newest releases that the package allows: `make test-matrix`.

    python -m tests.matrix [--keep] [oldest] [newest] [lmcache] [vllm] [sglang]

The last three are the adapters in the newest two releases of each engine
(`tests/engines/released/proofs.py`).

Each side has a virtual environment of its own in .cache/matrix (or in `MATRIX_DIR`), some GB for
torch, which is removed afterwards. The bounds are those of the two pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.engines.released import proofs

ROOT: Final = Path(__file__).parent.parent
PLACE: Final = Path(os.environ.get("MATRIX_DIR", ROOT / ".cache" / "matrix"))
SIDES: Final = ("oldest", "newest", *proofs.RELEASES)
TESTS: Final[dict[str, tuple[str, ...]]] = {
    "transformers": ("tests/models", "tests/examples/test_serve_models.py"),
    "torch": ("tests/session", "tests/kernels"),
    "numpy": ("tests/core", "tests/client"),
    "pydantic": ("tests/config", "tests/operations"),
    "pydantic-settings": (),
}
"""Packages whose extremes are tested, and the tests that each of them concerns."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests with the extremes of what is allowed")
    parser.add_argument("sides", nargs="*", help=f"of {' and '.join(SIDES)}; default: all")
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments for the next run"
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.sides) - set(SIDES):
        parser.error(f"{', '.join(sorted(unknown))}: expected {' or '.join(SIDES)}")
    failed = [side for side in chosen.sides or SIDES if not passes(side)]
    if not chosen.keep:
        shutil.rmtree(PLACE, ignore_errors=True)
    print(f"failed: {', '.join(failed)}" if failed else "passed", flush=True)
    return 1 if failed else 0


def passes(side: str) -> bool:
    """Set up an environment, and run the tests of all packages in it."""
    if side in proofs.RELEASES:
        return proofs.passes(side, PLACE)
    python = PLACE / side / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PLACE / side], check=True)
    others = PLACE / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    others.write_text("\n".join(line for line in lines if line.split("==")[0] not in TESTS))
    wanted = [requirement(name, side, allowed()[name]) for name in TESTS]
    pip = [python, "-m", "pip", "install", "-q", "--upgrade", "-c", others]
    subprocess.run([*pip, *wanted, "-e", ".[dev,examples]"], cwd=ROOT, check=True)
    print(f"{side}: {', '.join(wanted)}", flush=True)
    pytest = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    pytest += ["-m", "not timing and not gpu", *(one for tests in TESTS.values() for one in tests)]
    run = subprocess.run(pytest, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    return run.returncode == 0


def allowed() -> dict[str, SpecifierSet]:
    """The releases of each package that both projects allow, extras included."""
    found: dict[str, SpecifierSet] = {}
    for file in ("pyproject.toml", "client/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].values()
        for line in (*project["dependencies"], *(one for extra in extras for one in extra)):
            given = Requirement(line)
            found[given.name] = found.get(given.name, SpecifierSet()) & given.specifier
    return found


def requirement(name: str, side: str, releases: SpecifierSet) -> str:
    """What pip installs: the releases with the least allowed number, or the newest one allowed."""
    if side == "newest":
        return f"{name}{releases}"
    least = max(Version(one.version) for one in releases if one.operator == ">=")
    return f"{name}=={least}.*"


if __name__ == "__main__":
    sys.exit(main())
