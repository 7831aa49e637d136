"""The environment that torch's threads are given before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.settings import set_environment

ROOT = Path(__file__).resolve().parents[2]


def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for reply, left in ((None, "passive"), ("active", "active")):
        monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back afterwards
        monkeypatch.delenv("OMP_WAIT_POLICY")
        if reply is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", reply)
        set_environment("torch")
        assert os.environ["OMP_WAIT_POLICY"] == left, f"from {reply}"


def test_the_service_does_not_import_torch_before_its_threads_are_set_to_sleep() -> None:
    look = "import sys, service.__main__; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False)
    assert done.returncode == 0, "importing service.__main__ imports torch"
