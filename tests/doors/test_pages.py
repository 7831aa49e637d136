"""The door's own pages: health, metrics, the document, and Swagger UI without the internet."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest
from scripted import Running, decode_body, post, request, wait_for

from service.logs import ConsoleLines
from service.operations.table import OPERATIONS


def test_everything_that_the_docs_page_loads_is_here(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "://" not in page.text
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(links) >= 3
    for link in links:
        assert not link.startswith(("/", "http")), link
        assert client.get(str(page.url.join(link))).status_code == 200, link
    program = client.get("/docs/docs.js").text
    document = re.search(r"fetch\(\"([^\"]+)", program)
    assert document and client.get(str(page.url.join(document[1]))).json()["openapi"]
    assert "unsafe-inline" not in page.headers["content-security-policy"].partition("style-src")[0]


def test_the_index_links_every_page_for_browsers(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'href="([^"]+)"', page.text)
    assert {"live", "docs", "metrics", "health/live", "health/ready"} <= set(links)
    for link in links:
        assert not link.startswith("/"), "a proxy adds a prefix"
        assert client.get(f"/{link}").status_code != 404, link


def test_no_other_file_is_served(client: httpx.Client) -> None:
    for path in ("/docs/__init__.py", "/docs/..%2f__init__.py", "/redoc", "/docs/"):
        assert client.get(path).status_code == 404, path


def test_the_document_has_every_operation_and_page(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    found = {(path, method) for path, entry in paths.items() for method in entry}
    own = {(path, "get") for path in ("/health/live", "/health/ready", "/metrics", "/v1/events")}
    assert found == own | {(one.path, one.method.lower()) for one in OPERATIONS}


def test_every_answer_has_its_headers_in_the_document(client: httpx.Client) -> None:
    for entry in client.get("/openapi.json").json()["paths"].values():
        for operation in entry.values():
            for status, response in operation["responses"].items():
                more = {"401": "WWW-Authenticate", "405": "Allow"}.get(status)
                more = "Retry-After" if status in ("429", "503") else more
                assert set(response["headers"]) - {more} == {"X-Request-ID", "Server-Timing"}
                assert more is None or more in response["headers"]


def test_errors_of_any_request_are_in_the_document_of_every_route(client: httpx.Client) -> None:
    for path, entry in client.get("/openapi.json").json()["paths"].items():
        for operation in entry.values():
            found = operation["responses"].keys()
            assert found >= {"400", "401", "403", "405", "408", "429", "431"}, path


def test_requests_are_counted_by_operation_and_code(door: Running, client: httpx.Client) -> None:
    before = [door.counted("ok", "decode"), door.counted("not_found", "unknown")]
    post(client, "/v1/decode", decode_body())
    client.get("/nothing")
    reply = client.get("/metrics").text
    assert "attnd_request_duration_seconds_bucket" in reply
    after = [door.counted("ok", "decode"), door.counted("not_found", "unknown")]
    assert after == [count + 1 for count in before]


def test_malformed_requests_are_counted(door: Running) -> None:
    before = door.counted("malformed_request", "unknown")
    door.say(b"hello\r\n\r\n")
    wait_for(lambda: door.counted("malformed_request", "unknown") == before + 1, "the count")


def test_the_access_line_names_the_peer_and_cannot_be_forged(
    door: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attnd.access")

    def logged(number: int) -> dict[str, Any]:
        """The fields of the line of one request, and the peer they must have."""
        lines = [each for one in caplog.records for each in one.__dict__.get("each", ())]
        return next((fields for fields in lines if fields["id"] == f"find-{number}"), {})

    forged = "/v1/nothing%20status=200%20code=ok%2212:00:00.000%20info"
    wanted = (("POST", "/v1/decode", "decode", 200, "ok"), ("GET", forged, "unknown", 404, ""))
    for number, (method, path, op, status, code) in enumerate(wanted):
        with door.connect() as peer:
            name = "{}:{}".format(*peer.getsockname())
            body = decode_body() if method == "POST" else b""
            peer.sendall(request(path, body, method, x_request_id=f"find-{number}"))
            peer.recv(100)
        wait_for(lambda number=number: logged(number), "the line")
        fields = logged(number)
        assert (fields["peer"], fields["op"], fields["status"]) == (name, op, status)
        if code:
            assert (fields["method"], fields["path"], fields["code"]) == (method, path, code)
    record = logging.makeLogRecord({"msg": "request", "each": [logged(1)]})
    (line,) = ConsoleLines("http-0").format(record).splitlines()
    outside = re.sub(r'"[^"]*"', '""', line)
    assert re.findall(r" status=(\S+)", outside) == ["404"], line
    assert re.findall(r" code=(\S+)", outside) == ["not_found"], line
