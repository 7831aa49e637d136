"""A service without sharded sequences needs none of the code for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("service.core.shards", "service.engine.handlers.shards", "service.cluster.sharded")
PLAIN = (
    *("tests/cluster/routing/test_router.py", "tests/cluster/routing/test_broadcasts.py"),
    *("tests/engine/handlers/test_cascades.py", "tests/engine/handlers/test_sequences.py"),
    "tests/session/test_session_steps.py",
)
"""Tests of routers, of handlers, and of steps on one engine."""
BLOCKING = f"""
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {FOLDERS!r}:
            raise ImportError(name + " is for sharded sequences")


sys.meta_path.insert(0, Blocked())
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python that cannot import the folders, nor can its children."""
    (folder / "sitecustomize.py").write_text(BLOCKING)
    path = os.pathsep.join((str(folder), str(ROOT), str(ROOT / "tests")))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_door_imports_sharding_at_the_start_of_a_cluster_only() -> None:
    script = "import sys, {}; print('service.cluster.sharded.operations' in sys.modules)"
    for package, imports in (("cluster", "True"), ("doors", "False")):
        door = f"service.{package}.__main__"
        command = [sys.executable, "-c", script.format(door)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == imports, door


@pytest.mark.long
def test_tests_without_sharded_sequences_never_import_sharding(tmp_path: Path) -> None:
    for name in FOLDERS:
        assert "is for sharded sequences" in python(tmp_path, "-c", f"import {name}").stderr
    options = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long")
    ran = python(tmp_path, *options, *PLAIN)
    assert ran.returncode == 0, ran.stdout[-4000:]
