"""The road's example in C, compiled and run as its reader would, against a real service."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ROOT, SERVICE, run, running
from tests.harness.waiting import wait_for

COMPILER = shutil.which("cc")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c") / "road"
    source = str(ROOT / "examples" / "road.c")
    subprocess.run([str(COMPILER), *FLAGS, "-o", str(path), source, "-lm"], check=True, timeout=60)
    return path


def is_open(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.fixture(scope="module")
def engine_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("service") / "engine.sock"
    with running([*SERVICE, "--server.socket", str(path), "--server.port", "0"]) as service:
        wait_for(lambda: is_open(path), "the engine's socket")
        yield path
        assert service.stop() == 0


def test_it_appends_decodes_and_finds_the_numbers_right(program: Path, engine_socket: Path) -> None:
    for _ in range(2):  # the second run shows that the first one left nothing in the way
        done = run(program, engine_socket)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert "lse = " in done.stdout, done.stdout
        assert "largest difference from its own computation" in done.stdout, done.stdout


def test_the_command_of_the_examples_page_runs(tmp_path: Path, engine_socket: Path) -> None:
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    found = re.search(r"`(cc .+road\.c.+?)`", " ".join(page.split()))
    assert found
    command = found[1].replace("/tmp/attnd-$(id -u)/8080.sock", str(engine_socket))
    assert command != found[1], "it names the engine's socket"
    command = command.replace("/tmp/road", str(tmp_path / "road"))
    done = run("sh", "-c", command, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_socket_without_a_listener_is_an_error(program: Path, tmp_path: Path) -> None:
    done = run(program, tmp_path / "none.sock")
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
