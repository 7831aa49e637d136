"""Where the service listens: TCP, Unix sockets, and one clear line when it cannot."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.server import ServerSettings
from service.addresses import Addresses, bind_addresses
from service.road.engine_end.listening import CannotListen
from tests.harness.processes import SERVICE, run


class Bound:
    """Binds addresses with the engine's socket in the test's directory; closed in the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Addresses] = []

    def __call__(self, **server: Any) -> Addresses:
        given = {"port": 0, "socket": str(self.directory / f"{len(self.made)}.sock"), **server}
        self.made.append(bind_addresses(ServerSettings(**given)))
        return self.made[-1]


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Bound]:
    bind = Bound(tmp_path)
    yield bind
    for addresses in bind.made:
        addresses.close()


def port_of(addresses: Addresses) -> int:
    return int(addresses.url.rpartition(":")[2])


def connects(path: str | Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(path))
        except OSError:
            return False
    return True


def test_a_free_port_is_chosen_and_reported(bound: Bound) -> None:
    addresses = bound()
    assert addresses.url == f"http://127.0.0.1:{addresses.http[0].getsockname()[1]}"
    socket.create_connection(("127.0.0.1", port_of(addresses))).close()


def test_every_address_of_a_name_has_the_same_port(bound: Bound) -> None:
    addresses = bound(host="localhost")
    assert {one.getsockname()[1] for one in addresses.http} == {port_of(addresses)}


def test_an_address_of_ipv6_is_in_brackets(bound: Bound) -> None:
    try:
        addresses = bound(host="::1")
    except CannotListen:
        pytest.skip("no IPv6 here")
    assert addresses.url.startswith("http://[::1]:")


def test_nothing_listens_any_more_when_they_are_closed(bound: Bound, tmp_path: Path) -> None:
    uds = tmp_path / "http.sock"
    first, second = bound(), bound(uds=str(uds))
    assert connects(uds) and connects(first.engines[0].path)
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(first)))


@pytest.mark.parametrize(("mode", "found"), [("0600", 0o600), ("660", 0o660), ("0666", 0o666)])
def test_unix_sockets_have_the_mode_that_is_set_whatever_the_umask(
    bound: Bound, tmp_path: Path, mode: str, found: int
) -> None:
    before = os.umask(0o027)
    try:
        bound(uds=str(tmp_path / "http.sock"), uds_mode=mode, socket_mode=mode)
    finally:
        assert os.umask(before) == 0o027, "the umask was put back"
    for name in ("http.sock", "0.sock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == found


def test_a_socket_on_which_a_service_listens_is_not_taken(bound: Bound, tmp_path: Path) -> None:
    uds = str(tmp_path / "http.sock")
    bound(uds=uds)
    with pytest.raises(CannotListen, match=r"server\.uds .*another service listens there"):
        bound(uds=uds)
    assert connects(uds), "the first one still does"


def test_the_socket_file_of_a_dead_service_is_replaced(bound: Bound, tmp_path: Path) -> None:
    uds = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(uds)
    bound(uds=uds)
    assert connects(uds)


def test_a_socket_that_another_service_has_made_since_is_left_alone(
    bound: Bound, tmp_path: Path
) -> None:
    uds = tmp_path / "http.sock"
    first = bound(uds=str(uds))
    uds.unlink()
    bound(uds=str(uds))
    first.close()
    assert connects(uds)


def test_when_one_address_cannot_be_bound_the_other_is_given_back(
    bound: Bound, tmp_path: Path
) -> None:
    uds = tmp_path / "http.sock"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CannotListen):
        bound(uds=str(uds), socket=str(tmp_path / "file"))
    assert not uds.exists()
    assert (tmp_path / "file").read_text() == "mine"


def cases(tmp_path: Path) -> list[tuple[list[str], str]]:
    """Invalid arguments, and their errors."""
    (tmp_path / "file").write_text("")
    below, long = str(tmp_path / "file" / "x.sock"), str(tmp_path / ("x" * 200))
    return [
        (
            ["--server.host", "192.0.2.1", "--auth.open", "true"],
            "server.host 192.0.2.1, server.port 0: cannot assign",
        ),
        (["--server.host", "no.such.host.invalid"], "server.host no.such.host.invalid"),
        (["--server.uds", below], f"server.uds {below}"),
        (["--server.uds", long], f"server.uds {long}"),
        (["--server.uds", str(tmp_path / "file")], f"server.uds {tmp_path / 'file'}"),
        (["--server.socket", below], f"server.socket {below}"),
        (["--server.socket", str(tmp_path)], f"server.socket {tmp_path}"),
    ]


def test_an_address_that_cannot_be_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    for arguments, named in cases(tmp_path):
        if "--server.socket" not in arguments:
            arguments = [*arguments, "--server.socket", str(tmp_path / "engine.sock")]
        done = run(*SERVICE, "--server.port", "0", *arguments)
        assert done.returncode == 1, (arguments, done.stderr)
        (line,) = done.stderr.splitlines()
        assert "error main attnd: cannot listen: " in line and named in line, line


def test_without_a_directory_for_temporary_files_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(CannotListen, match="set TMPDIR"):
        bind_addresses(ServerSettings(port=0))


@pytest.mark.parametrize("files", [12, 40])
def test_with_too_few_open_files_nothing_starts_and_the_limit_is_named(files: int) -> None:
    done = run("sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *SERVICE, "--server.port", "0")
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"cannot start: at most {files} files may be open, each needs 64 or more: raise" in line


def test_a_port_that_is_taken_is_named_with_the_remedy(bound: Bound) -> None:
    taken = port_of(bound())
    with pytest.raises(CannotListen) as caught:
        bound(port=taken)
    assert str(caught.value) == (
        f"server.host 127.0.0.1, server.port {taken}: address already in use: stop what listens "
        "there, or set another port"
    )
