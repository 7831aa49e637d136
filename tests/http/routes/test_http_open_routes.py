"""Routes that answer without a key: only the declared ones, in no other spelling."""

from __future__ import annotations

import http.client
import random
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle, islice

import pytest
from http_messages import create
from http_secrets import keys_file
from http_service import Service, serving
from starlette.routing import Route

from tests.harness.waiting import WAIT_S

KEY = "a-key-of-red"
SECRET_ID = "the-id-that-only-red-knows"
PARAMETERS = {
    "sequence": SECRET_ID,
    "model": "list_sequences",
    "version": "1",
    "name": "live.js",
    "lease": "1",
}
ALWAYS_OPEN = {"/", "/health/live", "/health/ready"}
PAGE_FILES = {"/", "/live", "/live/live.js"}
"""The live page's own files hold nothing of the service's."""
OPENED_BY = {"metrics": {"/metrics"}, "live": {"/live/stream"}, "docs": {"/docs", "/openapi.json"}}
BEHIND = ("%0a", "%0A%0a", "%00", "%0d%0a", "/", "//", "/.", "/..", ";x", "%3bx", "%20", "%2f")
WITHIN = ("%0a", "%00", "/", "/.", "/%2e%2e/live")


def filled(path: str) -> str:
    """A route's path with a value for each parameter."""
    for name in PARAMETERS:
        path = path.replace(f"{{{name}}}", PARAMETERS[name])
    return path.replace("{", "").replace("}", "")


def spellings(path: str) -> Iterator[str]:
    """Other ways to write a path, or nearly so."""
    yield from (path + end for end in BEHIND)
    yield from (path + f"?{end}" for end in ("", "x=1", "%0a"))
    yield f"/{path}"
    yield f"/.{path}"
    yield f"/health/live/..{path}"
    yield f"http://x{path}"
    yield path.upper()
    yield path[:-1] + f"%{ord(path[-1]):02x}"
    yield path[:-1] + f"%25{ord(path[-1]):02x}"
    yield "/" + "".join(f"%{ord(one):02X}" for one in path[1:])
    head, slash, tail = path.rpartition("/")
    yield from (f"{head}{middle}{slash}{tail}" for middle in WITHIN if head)


class Asking:
    """Requests without a key on one connection, which is opened again where it was closed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.connection = self.opened()

    def opened(self) -> http.client.HTTPConnection:
        host, _, port = self.service.url.partition("://")[2].partition(":")
        return http.client.HTTPConnection(host, int(port), timeout=WAIT_S)

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """The status, and what follows it; of an answer without an end only its first bytes."""
        connection = self.connection
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        reply = connection.getresponse()
        has_end = reply.getheader("content-length") is not None or method == "HEAD"
        body = reply.read() if has_end or reply.status == 204 else reply.read1(65536)
        if reply.will_close or not has_end:
            reply.close()
            self.close()
            self.connection = self.opened()
        return reply.status, body

    def close(self) -> None:
        self.connection.close()


@pytest.fixture(scope="module", params=["metrics live", "docs"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, set[str]]]:
    """A service with keys, in which red has a sequence, and its open paths; the page that one
    setting opens stays closed where only the others are set."""
    keys = keys_file(tmp_path_factory.mktemp("keys"), {KEY: ("red", ["read", "append"])})
    opened = request.param.split()
    settings = [f"--auth.open-{name}=true" for name in opened]
    with serving(*keys, *settings) as service:
        with service.client(KEY) as client:
            create(client, SECRET_ID)
        yield service, ALWAYS_OPEN.union(PAGE_FILES, *(OPENED_BY[name] for name in opened))


@pytest.fixture
def asking(guarded: tuple[Service, set[str]]) -> Iterator[Asking]:
    with closing(Asking(guarded[0])) as asking:
        yield asking


def routes_of(service: Service) -> list[tuple[str, str]]:
    """Methods, also those that it does not have, and path of every route of the application."""
    found = []
    for route in service.routes_app.router.routes:
        assert isinstance(route, Route), f"{route} is of another kind: enumerate it, too"
        for method in sorted({"GET", "POST", "DELETE", "PUT", *(route.methods or ())}):
            found.append((method, filled(route.path)))
    return found


def test_every_route_asks_for_a_key_unless_it_is_declared_open(
    guarded: tuple[Service, set[str]], asking: Asking
) -> None:
    service, known = guarded
    for method, path in routes_of(service):
        status, body = asking.ask(method, path)
        is_open = path in known and method in ("GET", "HEAD")
        assert (status == 200) == is_open, (method, path, status)
        if not is_open and path not in known | {"/docs/live.js"}:
            assert status == 401, (method, path, status)
        assert SECRET_ID.encode() not in body.replace(path.encode(), b"")


def test_no_other_spelling_of_a_path_needs_less_of_a_key(
    guarded: tuple[Service, set[str]], asking: Asking
) -> None:
    service, known = guarded
    for method, path in routes_of(service):
        for spelling in spellings(path):
            status, body = asking.ask(method, spelling)
            assert status != 200 or path in known, (method, spelling)
            if SECRET_ID not in path:
                assert SECRET_ID.encode() not in body, (method, spelling)


@pytest.mark.parametrize("code", ["%00", "%09", "%0a", "%0d", "%1f", "%7f", "%c2%85", "%e2%80%a8"])
def test_a_control_character_in_a_path_is_refused(asking: Asking, code: str) -> None:
    for path in (f"/live/stream{code}", f"/v1/sequences/a{code}b", f"/{code}/health/live"):
        status, body = asking.ask("GET", path)
        assert status == 400, (path, status)
        assert b"malformed_request" in body


ODD_KEYS = (
    *(b"Bearer", b"Bearer ", b"Bearer  ", b"bearer\t", b"Basic " + KEY.encode(), KEY.encode()),
    *(b"Bearer\t" + KEY.encode(), b"Bearer " + KEY.encode() + b", Bearer b", b"Bearer \xff\xfe"),
    *(b"B\xe9arer x", b"Bearer " + b"x" * 2**15, b",", b'Digest username="x", realm="y"'),
    *(b"Bearer " + KEY.upper().encode(), b"Bearer x" + KEY.encode()),
)
GOOD_KEYS = tuple(
    scheme + between + KEY.encode() + after
    for scheme in (b"Bearer", b"bearer", b"BEARER")
    for between, after in ((b" ", b""), (b"  ", b" "), (b" \t", b"\t"))
)


def statuses(service: Service, data: bytes) -> list[int]:
    """The statuses of all final replies to these bytes."""
    with service.connect() as peer:
        peer.sendall(data)
        reply = b""
        while piece := peer.recv(65536):
            reply += piece
            if b"text/event-stream" in reply:
                break  # it does not end
    return [int(one) for one in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", reply)]


def request_of(method: str, path: str, *lines: bytes) -> bytes:
    first = f"{method} {path} HTTP/1.1".encode()
    return b"\r\n".join((first, b"host: localhost", b"connection: close", *lines, b"", b""))


def test_an_invalid_key_gets_401_at_every_route(guarded: tuple[Service, set[str]]) -> None:
    """Every route with four of the keys, in turn."""
    service, known = guarded
    keys = cycle(ODD_KEYS)
    for method, path in routes_of(service):
        if path not in known | {"/docs/live.js"}:
            for shown in islice(keys, 4):
                found = statuses(service, request_of(method, path, b"authorization: " + shown))
                assert found == [401], (method, path, shown, found)


@pytest.mark.parametrize("shown", GOOD_KEYS, ids=repr)
def test_a_key_is_accepted_with_its_scheme_in_any_case_and_space_around_it(
    guarded: tuple[Service, set[str]], shown: bytes
) -> None:
    request = request_of("GET", f"/v1/sequences/{SECRET_ID}", b"authorization: " + shown)
    assert statuses(guarded[0], request) == [200]


def test_a_key_of_64_kib_is_refused(guarded: tuple[Service, set[str]]) -> None:
    request = request_of("GET", "/v1/info", b"authorization: Bearer " + b"x" * 2**16)
    assert statuses(guarded[0], request) == [431]


ODD_LINES = (
    *(b"content-type: \xff", b"content-type: application/json; charset=\xff", b"content-type: ;"),
    *(b"accept: \xff\xfe", b"accept: ,;,;q=", b"content-encoding: \xff", b"expect: \xff"),
    *(b"x-attnd-deadline-ms: nan", b"x-attnd-deadline-ms: \xff", b"x-attnd-deadline-ms: 1e999"),
    *(b"x-request-id: \xff", b"x-request-id: " + b"x" * 9999, b"traceparent: \xff" + b"0" * 60),
    *(b"inference-header-content-length: \xb2", b"inference-header-content-length: -1"),
    *(b"inference-header-content-length: " + b"9" * 5000, b"last-event-id: \xff", b"range: x"),
    *(b"content-length: 0", b"content-length: " + b"9" * 18, b"transfer-encoding: chunked"),
    *(b"cookie: \xff", b"upgrade: websocket", b"connection: upgrade", b"origin: \xff"),
)
ODD_QUERIES = ("?\xff", "?%ff=%00", "?after=%ff", "?limit=1e9", "?limit=" + "9" * 5000, "?a&a=&&=")


def test_no_head_makes_any_route_answer_500(guarded: tuple[Service, set[str]]) -> None:
    """Two odd headers at a time, at every route by every method, with a key."""
    service, _ = guarded
    chance = random.Random(3)
    key = f"authorization: Bearer {KEY}".encode()
    for route, path in sorted(set(routes_of(service))):
        for method in {route, "HEAD", "PUT", "OPTIONS"}:
            for _ in range(4):
                lines = [key, *chance.sample(ODD_LINES, 2)]
                request = path + chance.choice(("", *ODD_QUERIES))
                data = request_of(method, request, *lines).replace("\xff".encode(), b"\xff")
                if b"transfer-encoding: chunked" in lines:
                    data += b"0\r\n\r\n"
                found = statuses(service, data)
                assert found and 500 not in found, (method, request, lines, found)
