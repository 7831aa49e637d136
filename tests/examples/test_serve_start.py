"""The start of examples/serve: help at once, and progress while a model loads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.serve.progress import stage

ROOT = Path(__file__).resolve().parents[2]


def test_help_describes_every_option_without_loading_torch() -> None:
    program = (
        "import runpy, sys; sys.argv = ['serve', '--help']\n"
        "try: runpy.run_module('examples.serve', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    for option in ("--port", "--model", "--attnd", "--live", "--pool-tokens", "--max-running"):
        assert option in done.stdout


def test_a_stage_that_takes_long_says_so_every_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="no model"), stage("loading the model"):
        time.sleep(2.5)
        raise ValueError("no model")
    assert capsys.readouterr().err.splitlines() == ["loading the model", "loading the model: 2 s"]
