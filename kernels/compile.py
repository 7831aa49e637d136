"""Compiles the CUDA sources with NVRTC, for any architecture, with or without a GPU.

A kernel is a source file plus `-D` definitions (`Spec`). Compiled kernels (cubins) live in a disk
cache keyed by a digest of every source file, the definitions, the architecture and the compiler.
Where that cannot be written to, they live in a folder of this process, which ends with it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

LOG: Final = logging.getLogger("attnd.kernels")
SOURCES: Final = Path(__file__).parent / "cuda"
DEFAULT_CACHE: Final = Path("~/.cache/attnd/kernels")
ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
CODE_OPTIONS: Final = ("-std=c++17", "--device-as-default-execution-space", "-ftz=true")
"""What every kernel is compiled with that its machine code depends on."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message carries its log."""


class Spec(NamedTuple):
    """One specialisation: `kernels/cuda/{source}.cu` compiled with `options`."""

    source: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}({', '.join(option.removeprefix('-D') for option in self.options)})"


def spec(source: str, **defines: int) -> Spec:
    """The specialisation with `-D{name}={value}` for each definition."""
    return Spec(source, tuple(f"-D{name}={value}" for name, value in defines.items()))


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of one kernel: registers a thread, and bytes of stack and spills."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and its compiler's log; `path` is its file, None without a cache."""

    spec: Spec
    arch: str
    cubin: bytes
    log: str
    path: Path | None = None

    @property
    def resources(self) -> Resources:
        """Read off the log; raises ValueError if the log does not have them."""
        registers = re.findall(r"Used (\d+) registers", self.log)
        if not registers:
            raise ValueError(f"no register count in the log of {self.spec} for {self.arch}")
        stack = re.findall(r"(\d+) bytes stack frame", self.log)
        spills = re.findall(r"(\d+) bytes spill", self.log)
        return Resources(
            registers=max(map(int, registers)),
            stack_bytes=max(map(int, stack), default=0),
            spill_bytes=sum(map(int, spills)),
        )


@functools.cache
def sources_digest(sources: Path = SOURCES) -> str:
    """SHA-256 of every CUDA source and header of a folder: all of them may be included by any."""
    digest = hashlib.sha256()
    for file in sorted([*sources.rglob("*.cu"), *sources.rglob("*.cuh")]):
        digest.update(f"{file.relative_to(sources).as_posix()}\0".encode())
        digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
        digest.update(b"\0")
    return digest.hexdigest()


def compile_all(
    specs: Sequence[Spec],
    arch: str,
    cache: Path | None = DEFAULT_CACHE,
    workers: int | None = None,
    sources: Path = SOURCES,
) -> list[Compiled]:
    """Compile the `specs` missing in the cache for `arch`, in parallel; keeps their order.

    `cache` None compiles everything and stores nothing. Raises `CompileError`.
    """
    with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda wanted: compile_cached(wanted, arch, cache, sources), specs))


def compile_cached(
    kernel: Spec, arch: str, cache: Path | None, sources: Path = SOURCES
) -> Compiled:
    """One kernel, from the cache if it is there."""
    if cache is None:
        return compile_spec(kernel, arch, sources)
    name = cached_name(kernel, arch, sources)
    for folder in (cache, *(Path(spare.name) for spare in SPARE)):
        with suppress(OSError, RuntimeError):  # the user may have no home
            path = folder.expanduser() / name
            cubin, log = own_file(path), own_file(path.with_suffix(".log")).decode()
            if cubin:
                return Compiled(kernel, arch, cubin, log, path)
    compiled = compile_spec(kernel, arch, sources)
    try:
        return stored(compiled, cache.expanduser() / name)
    except (OSError, RuntimeError) as error:
        return stored(compiled, Path(spare_cache(error)) / name)


def own_file(path: Path) -> bytes:
    """A file's contents. Raises `PermissionError` where a user beside root and the process's own
    can have written them: kernels run with the rights of the service."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"others can write to {path}")
        return file.read()


def cached_name(kernel: Spec, arch: str, sources: Path = SOURCES) -> str:
    """The cubin's name in a cache: other sources, options and compilers have other names."""
    common = (*CODE_OPTIONS, nvrtc_version())
    key = "\0".join([sources_digest(sources), kernel.source, *kernel.options, *common])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return f"{arch}/{Path(kernel.source).name}-{name}.cubin"


SPARE: Final[list[tempfile.TemporaryDirectory[str]]] = []
_SPARE_LOCK: Final = Lock()


def spare_cache(error: Exception) -> str:
    """The folder for kernels that cannot be stored in the cache because of `error`."""
    with _SPARE_LOCK:
        if not SPARE:
            LOG.warning("kernels are not cached, so that each start compiles them: %s", error)
            SPARE.append(tempfile.TemporaryDirectory(prefix="attnd-kernels-"))
        return SPARE[0].name


def stored(compiled: Compiled, path: Path) -> Compiled:
    """The same with its file, which is written. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".log"), compiled.log.encode())
    write_whole(path, compiled.cubin)
    return replace(compiled, path=path)


def write_whole(path: Path, content: bytes) -> None:
    """Write beside and rename, so that no reader sees half a file. All users may read it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@functools.cache
def nvrtc_version() -> str:
    """Raises `CompileError` where the compiler is not installed."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CompileError(f"{reason}: install the extra cuda: pip install '.[cuda]'") from error
    return f"{major}.{minor}"


def compiler_options() -> list[str]:
    """What every kernel is compiled with, whatever its architecture and wherever its sources.

    NVRTC's own cache (from 12.9 on, where there is a driver) would leave out the log.
    """
    major, minor = map(int, nvrtc_version().split("."))
    caches = (major, minor) >= (12, 9)
    return [*CODE_OPTIONS, "--ptxas-options=-v", *(["--no-cache"] if caches else [])]


def compile_spec(kernel: Spec, arch: str, sources: Path = SOURCES) -> Compiled:
    """Compile one kernel now. Raises `CompileError` with the compiler's log."""
    from cuda.bindings import nvrtc

    source = (sources / f"{kernel.source}.cu").read_bytes()
    options = [f"-arch={arch}", f"-I{sources}", *compiler_options(), *kernel.options]
    program = check(nvrtc.nvrtcCreateProgram(source, f"{kernel.source}.cu".encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # NVRTC writes into its argument: never pass bytes, since Python shares those of length 1
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0 ").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{kernel} does not compile for {arch}:\n{text}")
        cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return Compiled(kernel, arch, bytes(cubin), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def check(returned: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, or `CompileError` when it failed."""
    status, *values = returned
    if int(status) != 0:
        raise CompileError(f"NVRTC failed with {status}")
    return values[0] if values else None
