"""Write deploy/locked/: the exact packages of the image, with the hashes of their files.

`make lock` runs it. base.txt is what every image has; the file of an extra has what comes on top.
torch is the CPU build: name a folder or an index that has it, as in `ARGS="--find-links DIR"`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCKED: Final = ROOT / "deploy/locked"
EXTRAS: Final = ("cuda", "cuda12", "grpc", "zmq", "otel", "ray")
PYTHON: Final = "3.11"
PLATFORM: Final = "x86_64-manylinux_2_28"
HEAD: Final = "# Written by deploy/lock.py (make lock).\n"
BUILD: Final = "+cpu"
"""What the CPU build's version has behind it. Its hash stands beside those of the other builds, so
that an image for another processor finds its file too."""

Locked = dict[str, str]
"""The entry of each package, by `name==version`."""


def compiled(arguments: list[str], what: str | Path, *more: str | Path) -> Locked:
    """What uv resolves."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--no-emit-index-url", "--python-version", PYTHON]
    command += ["--python-platform", PLATFORM, *map(str, more), *arguments, str(what)]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries = [
        f"{entry}\n" for entry in text.replace("\\\n    ", "\\ ").splitlines() if "==" in entry
    ]
    return {entry.split()[0]: entry.replace("\\ ", "\\\n    ") for entry in entries}


def any_build(locked: Locked, pin: str) -> str:
    """The entry of torch with the hashes of all builds of its version."""
    public = pin.removesuffix(BUILD)
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write(f"{public}\n")
        wanted.flush()
        (other,) = compiled(["--no-deps"], wanted.name).values()
    hashes = dict.fromkeys(line for line in (locked[pin] + other).splitlines() if "--hash" in line)
    lines = sorted(line.removesuffix("\\").rstrip() for line in hashes)
    return " \\\n".join([public, *dict.fromkeys(lines)]) + "\n"


def main(arguments: list[str]) -> None:
    base = compiled(arguments, "pyproject.toml", "-c", "constraints.txt")
    (torch,) = (pin for pin in base if pin.startswith("torch=="))
    files = {"base": {**base, torch: any_build(base, torch)}}
    for extra in EXTRAS:
        given = ("-c", "constraints.txt", "--extra", extra)
        found = compiled(arguments, "pyproject.toml", *given)
        files[extra] = {pin: entry for pin, entry in found.items() if pin not in base}
    for name, entries in files.items():
        (LOCKED / f"{name}.txt").write_text(HEAD + "".join(entries.values()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
