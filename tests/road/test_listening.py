"""The engine's socket: its path, its modes, and files that are there already."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from attnd.wire import frames as f

from service.errors import Overloaded
from service.road.engine_end.listening import (
    SO_PASSRIGHTS,
    CannotListen,
    Peer,
    SpareDescriptor,
    accept,
    default_path,
    listen,
    may_connect,
    permit_descriptors,
    turn_away,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_socket_and_directory_are_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        listening = listen(tmp_path / "attnd" / "engine.sock", private=True)
        assert os.umask(0) == 0, "the umask was not restored"
    finally:
        os.umask(before)
    assert mode(listening.path) == 0o600
    assert mode(listening.path.parent) == 0o700
    listening.close()
    assert not listening.path.exists()


def test_the_default_place_is_a_directory_of_the_user_and_a_file_of_the_port() -> None:
    assert default_path(8080) == Path(tempfile.gettempdir(), f"attnd-{os.getuid()}", "8080.sock")


def test_a_live_owner_whose_backlog_is_full_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as caller:
        owner.bind(str(path))
        owner.listen(0)
        caller.connect(str(path))
        with pytest.raises(CannotListen, match="another service listens there"):
            listen(path, private=False)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_file_that_is_not_a_socket_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "engine.sock"
    match kind:
        case "file":
            path.write_text("data")
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotListen, match="the file there is not a socket: remove it"):
        listen(path, private=False)
    assert path.lstat()


def test_a_private_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "attnd").mkdir()
    (tmp_path / "attnd").chmod(0o750)
    with pytest.raises(CannotListen, match="mode 0750, others may enter it: chmod 700"):
        listen(tmp_path / "attnd" / "engine.sock", private=True)
    listen(tmp_path / "attnd" / "engine.sock", private=False).close()


def test_a_link_in_place_of_the_private_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "attnd").symlink_to(tmp_path / "real")
    with pytest.raises(CannotListen, match="is no directory of user"):
        listen(tmp_path / "attnd" / "engine.sock", private=True)


def test_a_private_directory_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CannotListen, match=f"others can write to {tmp_path}"):
        listen(tmp_path / "attnd" / "engine.sock", private=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "detail"), [("x" * 120, "path too long"), ("../missing/../file/a", "ot a directory")]
)
def test_an_impossible_path_is_reported_in_one_line(tmp_path: Path, name: str, detail: str) -> None:
    (tmp_path.parent / "file").write_text("")
    with pytest.raises(CannotListen, match=re.escape(detail)) as raised:
        listen(tmp_path / name, private=False)
    assert "\n" not in str(raised.value)
    (tmp_path.parent / "file").unlink()


def test_accept_returns_the_process_that_connected(tmp_path: Path) -> None:
    listening = listen(tmp_path / "engine.sock", private=False)
    assert accept(listening.sock) is None
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(listening.path))
        accepted = accept(listening.sock)
        assert accepted is not None
        sock, who = accepted
        assert who == Peer(os.getpid(), os.getuid())
        assert not sock.getblocking()
        sock.close()
    listening.close()


def test_own_user_root_and_named_users_may_connect() -> None:
    uid = os.getuid()
    assert may_connect(Peer(1, uid), frozenset())
    assert may_connect(Peer(1, 0), frozenset())
    assert may_connect(Peer(1, uid + 1), frozenset({uid + 1}))
    assert not may_connect(Peer(1, uid + 1), frozenset({uid + 2}))


def test_who_is_turned_away_reads_why() -> None:
    near, far = socket.socketpair()
    turn_away(far, Overloaded("256 sessions are open", retry_after_s=1.0))
    with near:
        data = near.recv(4096)
        assert near.recv(1) == b""
    kind, flags, size = f.HEADER.unpack_from(data)
    assert (kind, flags, size) == (f.REFUSED, 0, len(data) - 8)
    assert b"256 sessions are open" in data


def test_without_descriptors_a_connection_is_turned_away_and_not_left_waiting(
    tmp_path: Path,
) -> None:
    listening = listen(tmp_path / "engine.sock", private=False)
    spare = SpareDescriptor()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(listening.path))
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                accept(listening.sock)
            spare.turn_away(listening.sock, Overloaded("no descriptor is left"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert b"no descriptor is left" in caller.recv(4096)
    assert accept(listening.sock) is None
    spare.close()
    listening.close()


def test_peers_cannot_send_descriptors_until_they_are_permitted_to(tmp_path: Path) -> None:
    """To close a socket that lingers blocks, even where its descriptor was not asked for."""
    listening = listen(tmp_path / "engine.sock", private=False)
    try:
        forbids = not listening.sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
    except OSError:
        pytest.skip("Linux before 6.16: any peer can send descriptors")
    assert forbids
    with socket.socket(socket.AF_UNIX) as caller, open(os.devnull, "rb") as null:
        caller.connect(str(listening.path))
        with pytest.raises(PermissionError):
            socket.send_fds(caller, [b"x"], [null.fileno()])
        accepted = accept(listening.sock)
        assert accepted is not None
        with accepted[0] as sock:
            with pytest.raises(PermissionError):
                socket.send_fds(caller, [b"x"], [null.fileno()])
            assert permit_descriptors(sock)
            assert not permit_descriptors(sock), "it is permitted already"
            assert socket.send_fds(caller, [b"x"], [null.fileno()]) == 1
    listening.close()
