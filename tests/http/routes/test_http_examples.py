"""The OpenAPI document's examples: for the pool of the door, made before it accepts requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_messages import JSON
from http_service import serving

from service.doors.http.endpoints import openapi
from service.operations.table import OPERATIONS

WITHOUT = {
    *("renew_lease", "release_lease", "pin", "unpin"),
    *("import_sequence", "get_import", "cancel_import", "stream_events"),
}
"""Operations that need a value of an earlier reply, and the stream that does not end."""
POOLS: dict[str, tuple[str, ...]] = {
    "the tests'": (),
    "the default": (
        *("--pool.num-kv-heads", "8", "--pool.head-dim", "128", "--pool.num-layers", "4"),
        *("--pool.page-size", "16", "--pool.dtype", "fp16"),
    ),
    "one head, fp8": ("--pool.num-kv-heads", "1", "--pool.dtype", "fp8_e4m3"),
}


def as_shown(document: Any) -> Iterator[tuple[str, str, Any]]:
    """The operations from the top of the page to its end: by tag, in the document's order."""
    all_of_them = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = list(dict.fromkeys(operation["tags"][0] for *_, operation in all_of_them))
    yield from sorted(all_of_them, key=lambda one: tags.index(one[2]["tags"][0]))


@pytest.mark.parametrize("pool", POOLS)
def test_all_examples_succeed_one_after_another(pool: str) -> None:
    records = ("--cache.host-bytes", "8MiB", "--cache.records-share", "1.0")
    with serving(*POOLS[pool], *records) as running, running.client() as client:
        document = client.get("/openapi.json").json()
        tried = set()
        for path, method, operation in as_shown(document):
            if operation["operationId"] in WITHOUT:
                continue
            inside = [one for one in operation["parameters"] if one["in"] == "path"]
            url = path.format(**{one["name"]: one["example"] for one in inside})
            body = operation.get("requestBody", {"content": {JSON: {"example": None}}})
            assert next(iter(body["content"])) == JSON, f"{path}: what a form can send comes first"
            reply = client.request(method, url, json=body["content"][JSON]["example"])
            assert reply.is_success, f"{operation['operationId']}: {reply.text}"
            tried.add(operation["operationId"])
        assert tried >= {one.name for one in OPERATIONS} - WITHOUT


def test_the_document_is_made_before_the_door_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    openapi.document.cache_clear()
    with serving() as running, running.client() as client:
        made = openapi.document.cache_info().misses
        assert made == 1
        monkeypatch.setattr(openapi, "get_openapi", None)
        assert client.get("/openapi.json").is_success
