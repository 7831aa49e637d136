"""`Host` and `Origin`: names of the service only."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from scripted import Running, only, receive_all, serving

from config.settings import load_settings
from service.doors.kit.hosts import HostRule
from service.errors import Forbidden, MalformedRequest
from service.keys import line_of


def head(*lines: str, host: str = "host: localhost", method: str = "GET /v1/info") -> bytes:
    lines = (f"{method} HTTP/1.1", *([host] if host else []), *lines)
    return "\r\n".join([*lines, "", ""]).encode()


OWN = ("localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.9.9.9", "[::1]:80", "a.localhost.")
FOREIGN = ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1", "[::2]")
NONE = ("a b", "a/b", "localhost,evil.example", "user@localhost", "localhost:x", "[localhost", "ö")


def rule(*arguments: str) -> HostRule:
    return HostRule(load_settings([*arguments]))


def is_refused(rule: HostRule, host: str, origin: str | None = None) -> bool:
    given = None if origin is None else origin.encode()
    refusal = rule.refusal(host.encode(), given)
    assert refusal is None or isinstance(refusal, Forbidden)
    return refusal is not None


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(line_of("a", "a", ["read"]))
    return str(path)


def test_a_service_that_is_private_to_its_machine_has_only_names_of_its_own() -> None:
    private = rule()
    assert not any(is_refused(private, host) for host in OWN)
    assert all(is_refused(private, host) for host in FOREIGN)
    assert not is_refused(rule("--server.host", "here.example"), "here.example:80")


def test_a_proxys_name_may_be_allowed() -> None:
    for more in ([], ["--auth.open", "true"]):
        allowed = rule("--server.allowed-hosts", '["evil.example","::2"]', *more)
        assert not is_refused(allowed, "evil.example:8080") and not is_refused(allowed, "[::2]")
        assert not is_refused(allowed, "localhost") and is_refused(allowed, "10.0.0.1")
    anything = rule("--server.allowed-hosts", '["*"]')
    assert not any(is_refused(anything, host, "http://evil.example") for host in FOREIGN)


def test_a_service_that_is_not_private_has_all_names(keys: str) -> None:
    for arguments in (["--auth.open", "true"], ["--auth.keys-file", keys]):
        assert not any(is_refused(rule(*arguments), host) for host in (*OWN, *FOREIGN))


@pytest.mark.parametrize("host", NONE)
def test_an_invalid_host_is_malformed(host: str) -> None:
    for arguments in ([], ["--auth.open", "true"]):
        refusal = rule(*arguments).refusal(host.encode(), None)
        assert isinstance(refusal, MalformedRequest)


def test_without_keys_a_page_may_call_only_the_service_that_it_came_from(keys: str) -> None:
    foreign = ("http://evil.example", "http://localhost:3000", "null", "", "file://", "x")
    for arguments in ([], ["--auth.open", "true"]):
        one = rule(*arguments)
        assert all(is_refused(one, "localhost:8080", origin) for origin in foreign), arguments
        assert not is_refused(one, "localhost:8080", "http://LOCALHOST:8080")
    allowed = rule("--server.allowed-hosts", '["evil.example"]')
    assert not is_refused(allowed, "localhost:8080", "https://evil.example")
    assert is_refused(allowed, "localhost:8080", "https://not.evil.example")
    guarded = rule("--auth.keys-file", keys)
    assert not any(is_refused(guarded, "localhost:8080", origin) for origin in foreign)


PATHS = (
    *("/v1/info", "/v1/sequences", "/live/stream", "/v1/events"),
    *("/metrics", "/openapi.json"),
)


@pytest.mark.parametrize("line", ["host: evil.example", "origin: http://evil.example"])
def test_a_foreign_name_is_refused_everywhere_but_for_health(door: Running, line: str) -> None:
    host = line if line.startswith("host") else "host: localhost"
    more = () if host == line else (line,)
    for path in PATHS:
        for method in ("GET", "POST", "DELETE"):
            lines = (*more, "content-length: 0", "connection: close")
            reply = only(door.say(head(*lines, host=host, method=f"{method} {path}")))
            assert (reply.status, reply.problem["code"]) == (403, "forbidden"), (method, path)
            assert "server.allowed_hosts" in reply.problem["detail"]
    live = head(*more, "connection: close", host=host, method="GET /health/live")
    assert only(door.say(live)).status == 200
    assert not door.engine.heard


def test_a_unix_socket_has_no_name(tmp_path: Path) -> None:
    with serving(tmp_path, uds=tmp_path / "http"), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(tmp_path / "http"))
        foreign = head("connection: close", host="host: evil.example", method="GET /openapi.json")
        peer.sendall(foreign)
        assert receive_all(peer).startswith(b"HTTP/1.1 200 ")
