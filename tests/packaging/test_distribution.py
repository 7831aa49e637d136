"""The installed distribution: its names, its files, its command, beside modules of others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import fastapi
import httpx
import pytest

from service import __version__

pytestmark = pytest.mark.long

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "Makefile")
TREES: Final = ("service", "kernels", "config", "client")
FOR_OTHER_PROGRAMS: Final = {"grafana", "prometheus.yml", "prometheus-rules.yml"}
OTHERS: Final = ("service", "kernels", "config")
START_S: Final = 120.0
POOL: Final = (
    *("--backend.kind", "cpu", "--pool.num-layers", "1", "--pool.num-kv-heads", "1"),
    *("--pool.head-dim", "8", "--pool.num-pages", "4096", "--pool.dtype", "fp32"),
)
LONG: Final = 4000
"""Rows whose JSON has nearly as many values as a call may have."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the distribution, and a folder with modules of the same names."""

    python: Path
    folder: Path

    @property
    def attnd(self) -> Path:
        return self.python.with_name("attnd")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=START_S,
        )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that a build leaves nothing behind in the clone."""
    copy = tmp_path_factory.mktemp("sources")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    for name in TREES:
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def dist(sources: Path) -> Path:
    """The folder that `make release` writes, with this environment."""
    stale = sources / "build/lib/attnd_service/service/removed.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    venv_of_tests = sys.prefix
    command = ["make", f"VENV={venv_of_tests}", "-o", f"{venv_of_tests}/.dev", "release"]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sources / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"attnd-{__version__}-py3-none-any.whl"


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def install(folder: Path, *what: str | Path) -> Installed:
    """A new environment that sees this one's dependencies, and not its attnd."""
    venv.create(folder / "env")
    (site,) = folder.glob("env/lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(fastapi.__file__).parents[1]}\n")
    python = folder / "env/bin/python"
    options = ("--no-deps", "--ignore-installed", "--no-build-isolation")
    pip("--python", python, "install", *options, *what)
    working = folder / "work"
    working.mkdir()
    for name in OTHERS:
        (working / f"{name}.py").write_text(f"raise SystemExit('this {name} is another program')\n")
    return Installed(python, working)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("installed"), wheel)


def test_a_release_has_both_wheels_with_their_hashes(dist: Path, wheel: Path) -> None:
    client = dist / f"attnd_client-{__version__}-py3-none-any.whl"
    assert sorted(dist.iterdir()) == sorted([dist / "SHA256SUMS", wheel, client])
    hashes = {sha256(path.read_bytes()).hexdigest(): path.name for path in (wheel, client)}
    lines = (dist / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    assert dict(line.split() for line in lines) == hashes


CALL: Final = """
import attnd, numpy as np
with attnd.Client(uds={socket!r}) as client:
    name = client.create_sequence().id
    k = np.ones((3, 1, 8), np.float32)
    client.append(0, [name], k, k, append_indptr=[0, 3])
    print(client.decode(0, [name], k[:1]).o[0, 0, 0], client.info().version, attnd.__version__)
"""


def test_the_client_of_a_release_calls_the_service_of_the_release(
    dist: Path, installed: Installed, tmp_path: Path
) -> None:
    own = install(tmp_path, dist / f"attnd_client-{__version__}-py3-none-any.whl")
    with serving(installed):
        call = CALL.format(socket=str(installed.folder / "http.sock"))
        done = own.run(own.python, "-c", call)
    assert done.stdout.split() == ["1.0", __version__, __version__], done.stderr
    assert not own.attnd.exists(), "the client has no command"


def test_the_wheel_has_two_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"attnd", "attnd_service"}


def test_the_wheel_has_every_module_and_every_file_that_modules_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packaged = set(archive.namelist())
    wanted = {f"attnd/{path}" for path in below(ROOT / "client/src/attnd")}
    for name in OTHERS:
        wanted |= {f"attnd_service/{name}/{path}" for path in below(ROOT / name)}
    assert not wanted - packaged
    assert not [name for name in packaged if name.endswith("removed.py")], "of an earlier build"


def below(folder: Path) -> Iterator[str]:
    """The files of a package that a running service may need."""
    for path in folder.rglob("*"):
        part = path.relative_to(folder)
        unwanted = {"__pycache__", *FOR_OTHER_PROGRAMS} & set(part.parts)
        if path.is_file() and path.suffix not in (".md", ".pyc") and not unwanted:
            yield part.as_posix()


@contextmanager
def serving(installed: Installed, *arguments: str, **environment: str) -> Iterator[httpx.Client]:
    """`attnd serve` in the folder of the other modules, once it is ready."""
    socket = installed.folder / "http.sock"
    log = installed.folder / "log"
    command = [installed.attnd, "serve", "--server.uds", "http.sock", *POOL, *arguments]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=installed.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://attnd", timeout=60
        ) as client:
            wait_ready(client, process, log)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text()
        if "listening on" in log.read_text() and client.get("/health/ready").is_success:
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def append_and_decode(client: httpx.Client) -> dict[str, Any]:
    """An append of nearly as many values as JSON may have, and a decode over it."""
    key = {"dtype": "F32", "shape": [LONG, 1, 8], "data": [0.25] * (8 * LONG)}
    query = {"dtype": "F32", "shape": [1, 1, 8], "data": [1.0] * 8}
    calls = (
        ("sequences", {"sequences": [{"id": "a"}]}),
        (
            "append",
            {
                "layer": 0,
                "sequences": ["a"],
                "append_indptr": [0, LONG],
                "tensors": {"k": key, "v": key},
            },
        ),
        ("decode", {"layer": 0, "sequences": ["a"], "tensors": {"q": query}}),
    )
    for route, body in calls:
        ends = time.monotonic() + START_S
        while (reply := client.post(f"/v1/{route}", json=body)).status_code == 503:
            assert time.monotonic() < ends, reply.text  # an engine of the cluster still starts
            time.sleep(0.2)
        assert reply.is_success, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cluster.engines", "2"),
        ("--cache.zmq-endpoint", "ipc://events.sock"),
        pytest.param(
            ("--cluster",),
            marks=pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
        ),
    ],
    ids=["a cluster", "one engine with ZeroMQ", "on Ray"],
)
def test_attnd_serves_in_a_folder_of_modules_with_the_same_names(
    installed: Installed, arguments: tuple[str, ...]
) -> None:
    with serving(installed, *arguments, PYTHONPATH=str(installed.folder)) as client:
        output = append_and_decode(client)["tensors"]["o"]["data"]
        assert output == pytest.approx([0.25] * 8)
        assert client.get("/live").is_success
    log = (installed.folder / "log").read_text(encoding="utf-8")
    assert "infinite retries" not in log, "an end that was asked for looks like a failure"
    assert not re.search("^INFO .* serve ", log, re.MULTILINE), "Serve's own lines are noise"


def test_attnd_makes_keys_and_prints_its_version(installed: Installed) -> None:
    key = installed.run(installed.attnd, "key", "new", "--namespace", "search")
    assert len(key.stdout.splitlines()) == 2, key.stderr
    image = installed.run(installed.attnd, "serve", "key", "new", "--namespace", "search")
    assert len(image.stdout.splitlines()) == 2, "the image's entry point is `attnd serve`"
    assert installed.run(installed.attnd, "--version").stdout.startswith("attnd ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serv",), "attnd: serv: unknown command, expected serve, gateway, key or compile"),
        (("--pool.num-pages", "64"), "settings follow `attnd serve`"),
    ],
)
def test_an_unknown_command_is_refused_with_the_remedy(
    installed: Installed, arguments: tuple[str, ...], said: str
) -> None:
    done = installed.run(installed.attnd, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_attnd_without_a_command_lists_the_commands(installed: Installed) -> None:
    done = installed.run(installed.attnd)
    assert done.returncode == 0
    for command in ("attnd serve", "attnd key new", "attnd compile"):
        assert command in done.stdout


def test_the_client_is_installed_with_the_service(installed: Installed) -> None:
    done = installed.run(installed.python, "-c", "import attnd; print(attnd.__file__)")
    assert str(installed.python.parents[1]) in done.stdout, done.stderr


def test_an_editable_install_serves_from_the_clone(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = install(tmp_path_factory.mktemp("editable"), "-e", sources)
    with serving(found) as client:
        assert append_and_decode(client)
    done = found.run(found.python, "-c", "import attnd; print(attnd.__file__)")
    assert str(sources) in done.stdout, done.stderr
