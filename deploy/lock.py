"""Writes deploy/locked/: the exact packages of the image, with the hashes of their files.

`make lock` runs it. base.txt has the packages of every image, the file of an extra those on top.
torch must be the CPU build: name a folder or an index with it, as in `ARGS="--find-links DIR"`. An
image for another Python or processor than those below needs its own lock files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCKED: Final = ROOT / "deploy/locked"
EXTRAS: Final = ("cuda", "cuda12", "oip", "zmq", "otel", "ray")
PYTHON: Final = "3.11"
PLATFORM: Final = "x86_64-manylinux_2_28"
HEAD: Final = "# Written by deploy/lock.py (make lock).\n"
Locked = dict[str, str]
"""The entry of each package, by `name==version`."""


def compiled(*arguments: str) -> Locked:
    """The packages that uv resolves."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--no-emit-index-url", "--python-version", PYTHON]
    command += [
        "--python-platform",
        PLATFORM,
        "-c",
        "constraints.txt",
        *arguments,
        "pyproject.toml",
    ]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries = [
        f"{entry}\n" for entry in text.replace("\\\n    ", "\\ ").splitlines() if "==" in entry
    ]
    return {entry.split()[0]: entry.replace("\\ ", "\\\n    ") for entry in entries}


def main(arguments: list[str]) -> None:
    base = compiled(*arguments)
    files = {"base": base}
    for extra in EXTRAS:
        found = compiled("--extra", extra, *arguments)
        files[extra] = {pin: entry for pin, entry in found.items() if pin not in base}
    for name, entries in files.items():
        (LOCKED / f"{name}.txt").write_text(HEAD + "".join(entries.values()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
