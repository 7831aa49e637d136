"""The engine's unix socket: its path, and the users who may bind it and connect."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from service.road.messages import refusal
from service.trusted_paths import check_parents

BACKLOG: Final = 256
CREDENTIALS: Final = struct.Struct("<iII")
"""pid, uid, gid of SO_PEERCRED."""
SO_PASSRIGHTS: Final = 83
"""Option of Linux 6.16: whether the peers of a socket can send it descriptors."""


class Unusable(Exception):
    """A file at the path, or a directory above it, prevents the socket."""


class CannotListen(Exception):
    """The socket cannot be bound at its path; one line with the reason and the remedy."""


class Listener(Protocol):
    """The engine's use of a socket that listens."""

    @property
    def family(self) -> int: ...

    def accept(self) -> tuple[socket.socket, Any]: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listening:
    """A bound socket and the file that is ours."""

    sock: socket.socket
    path: Path
    inode: int

    def unlink(self) -> None:
        """Remove the file, unless another one has replaced it."""
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()

    def close(self) -> None:
        self.unlink()
        self.sock.close()


@dataclass(frozen=True, slots=True)
class Peer:
    """The process and user at the other end of a connection; -1 where unknown."""

    pid: int
    uid: int


def default_path(port: int) -> Path:
    """The engine's socket of the service on `port` where server.socket is not set. Raises
    CannotListen where no directory for temporary files can be written."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        text = "the directory for temporary files cannot be written: set TMPDIR, or server.socket"
        raise CannotListen(text) from error
    return Path(folder) / f"attnd-{os.getuid()}" / f"{port}.sock"


def listen(
    path: Path, *, private: bool, mode: int = 0o600, setting: str = "server.socket"
) -> Listening:
    """Bind a unix socket at `path`, replacing one without a listener.

    A `private` directory must be ours alone; one that is missing is made so in any case. `setting`
    is named in errors. Raises CannotListen.
    """
    try:
        make_directory(path.parent, private)
        with locked(path.parent):
            check_free(path)
            path.unlink(missing_ok=True)
            sock = bind(path, mode)
            return Listening(sock, path, path.lstat().st_ino)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotListen(f"{setting} {path}: {reason}: set another path") from error
    except Unusable as error:
        raise CannotListen(f"{setting} {path}: {error}") from error


def make_directory(directory: Path, private: bool) -> None:
    """Make the socket's directory with mode 0700, or check the one that is there."""
    if private:
        check_parents(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not private:
        return
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Unusable(f"{directory} is no directory of user {os.getuid()}: set another path")
    if found.st_mode & 0o077:
        shown = stat.S_IMODE(found.st_mode)
        raise Unusable(f"{directory} has mode {shown:04o}, others may enter it: chmod 700 it")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory: one service at a time checks it and binds there."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_free(path: Path) -> None:
    """Raises Unusable unless `path` is free, or a socket without a listener."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Unusable("the file there is not a socket: remove it, or set another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # its backlog is full
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                return
    raise Unusable("another service listens there: stop that one, or set another path")


def bind(path: Path, mode: int) -> socket.socket:
    """A listening socket whose file has `mode` from its first moment on. Peers cannot send
    descriptors: to close one can block its receiver for as long as its sender likes (SO_LINGER)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock


def accept(listener: Listener) -> tuple[socket.socket, Peer] | None:
    """A new connection and who made it; None when there is none. May raise OSError (EMFILE)."""
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, InterruptedError, ConnectionAbortedError):
        return None
    sock.setblocking(False)
    return sock, peer(sock)


def peer(sock: socket.socket) -> Peer:
    """The process that connected, as the system knows it."""
    if not hasattr(socket, "SO_PEERCRED") or sock.family != socket.AF_UNIX:
        return Peer(-1, -1)
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def may_connect(who: Peer, uids: frozenset[int]) -> bool:
    """Our own user, root, and the users of server.socket_uids."""
    return who.uid in (-1, 0, os.getuid()) or who.uid in uids


def permit_descriptors(sock: socket.socket) -> bool:
    """Let the peer send descriptors; False where it could do so before."""
    try:
        if sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS):
            return False
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
    except OSError:  # an older kernel
        return False
    return True


def turn_away(sock: socket.socket, error: BaseException) -> None:
    """Refuse a new connection with the reason, and close it."""
    with contextlib.suppress(OSError):
        sock.send(refusal(error))
    sock.close()


class SpareDescriptor:
    """A reserve, so that connections can be refused when the process has no descriptor left.

    Otherwise they would stay in the backlog, and the listening socket readable.
    """

    def __init__(self) -> None:
        self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def turn_away(self, listener: Listener, error: BaseException) -> None:
        """After `accept` raised: accept the connection with the spare descriptor, and refuse it."""
        os.close(self.fd)
        try:
            with contextlib.suppress(OSError):
                turn_away(listener.accept()[0], error)
        finally:
            self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)
