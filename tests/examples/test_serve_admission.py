"""Who may call examples/serve, how many at once, and what becomes of callers that take nothing."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from examples.serve.admission import Admission

LOCAL = ["localhost:80", "127.0.0.1", "[::1]:8000", "chat.localhost", "127.1.2.3:9"]


@pytest.mark.parametrize(
    ("host", "allowed", "name", "origin", "status"),
    [
        *(("127.0.0.1", [], name, "", 200) for name in [*LOCAL, ""]),
        ("127.0.0.1", [], "evil.example", "", 403),
        ("127.0.0.1", [], "localhost.evil.example:8000", "", 403),
        ("127.0.0.1", [], "a b", "", 400),
        ("127.0.0.1", [], "localhost:1", "http://localhost:1", 200),
        ("127.0.0.1", [], "localhost:1", "http://localhost:2", 403),
        ("127.0.0.1", [], "localhost:1", "null", 403),
        ("127.0.0.1", [], "", "http://evil.example", 403),
        ("127.0.0.1", ["Chat.Example"], "chat.example:8", "https://chat.example", 200),
        ("127.0.0.1", ["chat.example"], "localhost", "https://other.example", 403),
        ("0.0.0.0", [], "any.example", "http://any.example", 200),
        ("0.0.0.0", [], "any.example", "http://other.example", 403),
        ("0.0.0.0", ["chat.example"], "any.example", "", 403),
    ],
)
def test_requests_of_foreign_pages_are_rejected(
    host: str, allowed: list[str], name: str, origin: str, status: int
) -> None:
    given = {b"host": name.encode(), b"origin": origin.encode()}
    headers = {key: value for key, value in given.items() if value}
    assert Admission(host, allowed, 1).refusal(headers)[0] == status


async def test_requests_beyond_the_limit_are_a_429_until_others_end() -> None:
    going, may_end = [], asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            going.append(scope)
            await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    transport = httpx.ASGITransport(Admission("localhost", [], 2).before(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        first = [asyncio.create_task(client.post("/v1/x")) for _ in range(2)]
        while len(going) < 2:
            await asyncio.sleep(0)
        rejected = await client.post("/v1/x")
        assert (rejected.status_code, rejected.headers["Retry-After"]) == (429, "1")
        error = rejected.json()["error"]
        assert (error["code"], error["param"]) == ("rate_limit_exceeded", None)
        assert "2 requests run or wait" in error["message"]
        assert (await client.get("/health")).status_code == 200
        may_end.set()
        assert [(await one).status_code for one in first] == [200, 200]
        assert (await client.post("/v1/x")).status_code == 200


@pytest.mark.long
async def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.serve import api

    monkeypatch.setattr(api, "BODY_S", 0.1)
    app = api.create_app(
        object(),  # type: ignore[arg-type]
        SimpleNamespace(name="x"),  # type: ignore[arg-type]
        SimpleNamespace(routes=list),  # type: ignore[arg-type]
        Admission("localhost", [], 9),
    )
    sent: list[Any] = []
    pieces = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Any:
        return next(pieces, None) or await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
             "query_string": b"", "root_path": "", "http_version": "1.1"}  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["status"] == 408
    assert "longer than 0.1 s" in json.loads(sent[1]["body"])["error"]["message"]
