"""The door's own pages: health, metrics, the document, and Swagger UI without the internet."""

from __future__ import annotations

import re

import httpx
from scripted import Running, decode_body, request, wait_for

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
    document = re.search(r"url: ['\"]([^'\"]+)", page.text)
    assert document and client.get(str(page.url.join(document[1]))).json()["openapi"]


def test_the_index_links_what_a_browser_can_read_here(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'href="([^"]+)"', page.text)
    assert {"live", "docs", "metrics", "health/live", "health/ready"} <= set(links)
    for link in links:
        assert not link.startswith("/"), "a proxy's prefix stands before it"
        assert client.get(f"/{link}").status_code != 404, link


def test_no_other_file_is_served(client: httpx.Client) -> None:
    for path in ("/docs/__init__.py", "/docs/..%2f__init__.py", "/redoc", "/docs/"):
        assert client.get(path).status_code == 404, path


def test_the_document_has_every_operation_and_page(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    found = {(path, method) for path, entry in paths.items() for method in entry}
    own = {("/health/live", "get"), ("/health/ready", "get"), ("/metrics", "get")}
    assert found == own | {(one.path, one.method.lower()) for one in OPERATIONS}


def test_every_answer_has_its_headers_in_the_document(client: httpx.Client) -> None:
    for entry in client.get("/openapi.json").json()["paths"].values():
        for operation in entry.values():
            for response in operation["responses"].values():
                assert set(response["headers"]) == {"X-Request-ID", "Server-Timing"}


def test_requests_are_counted_by_operation_and_code(door: Running, client: httpx.Client) -> None:
    before = [door.counted("ok", "decode"), door.counted("not_found", "unknown")]
    headers = {"content-type": "application/vnd.safetensors"}
    client.post("/v1/decode", content=decode_body(), headers=headers)
    client.get("/nothing")
    reply = client.get("/metrics").text
    assert "attnd_request_duration_seconds_bucket" in reply
    after = [door.counted("ok", "decode"), door.counted("not_found", "unknown")]
    assert after == [count + 1 for count in before]


def test_what_is_no_request_is_counted_too(door: Running) -> None:
    before = door.counted("malformed_request", "unknown")
    door.say(b"hello\r\n\r\n")
    wait_for(lambda: door.counted("malformed_request", "unknown") == before + 1, "the count")


def test_the_access_line_names_the_peer(door: Running, caplog: object) -> None:
    import logging

    caplog.set_level(logging.INFO, "attnd.access")  # type: ignore[attr-defined]
    with door.connect() as peer:
        name = "{}:{}".format(*peer.getsockname())
        peer.sendall(request("/v1/decode", decode_body(), x_request_id="find-me"))
        peer.recv(100)

    def lines() -> list[dict[str, object]]:
        records = caplog.records  # type: ignore[attr-defined]
        reply = [record.each for record in records if record.name == "attnd.access"]
        return [fields for each in reply for fields in each if fields["id"] == "find-me"]

    wait_for(lines, "the line")
    (mine,) = lines()
    assert (mine["peer"], mine["op"], mine["status"]) == (name, "decode", 200)
    assert (mine["method"], mine["path"], mine["code"]) == ("POST", "/v1/decode", "ok")
