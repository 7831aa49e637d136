"""The two caches below vLLM under test, on one small disk: its own `fs` tier, and attnd's."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, Final, Protocol

from attnd import Client

from bench.driver.servers import Server, free_port, running

FLIP_EVERY: Final = 1024


class Tier(Protocol):
    """A cache below vLLM, whose bytes are files in `folder`."""

    name: str

    def options(self) -> dict[str, Any]: ...
    def restart(self) -> None: ...
    def damage(self, how: str) -> None: ...
    def kill(self) -> None: ...
    @contextmanager
    def hanging(self, seconds: float) -> Iterator[None]: ...
    def empty(self) -> None: ...
    def misses(self) -> str: ...
    def close(self) -> None: ...


class FsTier:
    """vLLM's own tier: a file for each block."""

    name = "fs"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fs"

    def options(self) -> dict[str, Any]:
        return {"type": "fs", "root_dir": str(self.folder)}

    def restart(self) -> None:
        """Nothing runs beside the engine."""

    def damage(self, how: str) -> None:
        for file in self.folder.rglob("*.bin"):
            spoil(file, how)

    def kill(self) -> None:
        shutil.rmtree(self.folder)

    @contextmanager
    def hanging(self, seconds: float) -> Iterator[None]:
        yield

    def empty(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def misses(self) -> str:
        """No reasons are known."""
        return ""

    def close(self) -> None:
        self.empty()


class AttndService:
    """attnd's tier over a service without a pool, on the same disk."""

    name = "attnd"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attnd"
        self.stack = ExitStack()
        self.port = free_port()
        self.server = self._start()

    def _start(self) -> Server:
        sizes = ("--cache.host-bytes", "64MiB", "--cache.disk-bytes", "32MiB")
        arguments = ["-m", "service", "--server.port", str(self.port), "--backend.kind", "none"]
        arguments += [*sizes, "--cache.disk-path", str(self.folder)]
        return self.stack.enter_context(running(arguments, self.port))

    def options(self) -> dict[str, Any]:
        module = {"type": "AttndTier", "module_path": "attnd.vllm"}
        return {**module, "url": self.server.url, "deadline_s": 2.0}

    def restart(self) -> None:
        """Host memory is empty afterwards: blocks come from the disk."""
        self.stack.close()
        self.server = self._start()

    def damage(self, how: str) -> None:
        self.stack.close()
        for file in self.folder.rglob("*"):
            if file.is_file() and file.stat().st_size >= 2**20:
                spoil(file, how)
        self.server = self._start()

    def kill(self) -> None:
        for pid in family(self.server.pid):
            os.kill(pid, signal.SIGKILL)

    @contextmanager
    def hanging(self, seconds: float) -> Iterator[None]:
        """Stops the service's processes; they go on `seconds` later, or at the end."""
        pids = family(self.server.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        going_on = Timer(seconds, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
        going_on.start()
        try:
            yield
        finally:
            going_on.join()

    def empty(self) -> None:
        self.stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.server = self._start()

    def misses(self) -> str:
        """Reasons of misses since the start of the service, with the number of records."""
        with Client(self.server.url) as client:
            lines = client.metrics().splitlines()
        pattern = r'attnd_record_lookups_total{.*outcome="(\w+)".*} (\d+)'
        found = [match for line in lines if (match := re.match(pattern, line))]
        counts = {one[1]: int(one[2]) for one in found if int(one[2]) and one[1] != "found"}
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

    def close(self) -> None:
        self.stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def spoil(file: Path, how: str) -> None:
    """Flip a bit of the exponent of each 256th fp32 number of a file, or cut it to its half."""
    if how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
        return
    data = bytearray(file.read_bytes())
    for at in range(FLIP_EVERY - 1, len(data), FLIP_EVERY):
        data[at] ^= 0x40
    file.write_bytes(data)


def family(pid: int) -> list[int]:
    """A process and all below it, the parents first."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            children = (task / "children").read_text().split()
            found += [int(child) for child in children]
    return found


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A file that takes all that the disk has left."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(2**16))
                file.flush()
        except OSError:
            pass
    yield
    filler.unlink()
