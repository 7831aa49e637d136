"""Namespaces do not see each other: every operation, by a key of every scope, on another's ids."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    append,
    create,
    post,
    read_body,
    write_body,
)
from http_process import START_S, is_ready, listening
from http_service import WAIT_S, serving, wait_for

from service.keys import line_of
from service.operations.spec import Operation
from service.operations.table import OPERATIONS
from service.tenants import SCOPES

TOKENS = list(range(101, 101 + 2 * PAGE_SIZE))
DIGEST = "0f" * 32
Body = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ids:
    """What one may name: another namespace's, or what nobody has. All are as long."""

    sequence: str
    importing: str
    lease: str
    page_key: str
    generation: str

    @property
    def all(self) -> tuple[str, ...]:
        return (self.sequence, self.importing, self.lease, self.page_key, self.generation)


def of_value(value: float, n: int = 1, heads: int = KV_HEADS) -> Any:
    return np.full((n, heads, HEAD_DIM), value, WIRE_DTYPE)


def fields(**given: Any) -> Body:
    return given, {}


def attend(ids: Ids) -> Body:
    return {"layer": 0, "sequences": [ids.sequence]}, {"q": of_value(1, 1, QO_HEADS)}


REQUESTS: Mapping[str, Callable[[Ids], list[Body]]] = {
    "create_sequences": lambda ids: [
        fields(sequences=[{"parent": ids.sequence}]),
        fields(sequences=[{"parent": ids.sequence, "length": 1}]),
        fields(sequences=[{}, {"parent": ids.sequence}]),
    ],
    "list_sequences": lambda ids: [fields(after=ids.sequence)],
    "get_sequence": lambda ids: [fields(id=ids.sequence), fields(id=ids.importing)],
    "delete_sequence": lambda ids: [fields(id=ids.sequence), fields(id=ids.importing)],
    "truncate": lambda ids: [
        fields(id=ids.sequence, length=1),
        fields(id=ids.sequence, length=10**6),
        fields(id=ids.sequence, length=1, layer=0),
    ],
    "page_table": lambda ids: [fields(sequences=[ids.sequence], layer=0)],
    "append": lambda ids: [
        ({"layer": 0, "sequences": [ids.sequence], **more}, {"k": of_value(1), "v": of_value(1)})
        for more in ({}, {"offsets": [0]}, {"offsets": [10**6]})
    ],
    "gather": lambda ids: [
        fields(layer=0, sequences=[ids.sequence]),
        fields(layer=0, sequences=[ids.sequence], start=10**6),
    ],
    "decode": lambda ids: [
        attend(ids),
        (attend(ids)[0], {**attend(ids)[1], "k": of_value(1), "v": of_value(1)}),
    ],
    "prefill": lambda ids: [({**attend(ids)[0], "qo_indptr": [0, 1]}, attend(ids)[1])],
    "ragged_prefill": lambda ids: [],
    "cascade": lambda ids: [
        (
            {"layer": 0, "levels": [{"sequences": [ids.sequence], "qo_indptr": [0, 1]}]},
            attend(ids)[1],
        )
    ],
    "merge": lambda ids: [],
    "info": lambda ids: [],
    "pool": lambda ids: [],
    "match_prefix": lambda ids: [
        fields(token_ids=TOKENS, lease_s=1),
        fields(page_keys=[ids.page_key], lease_s=1),
    ],
    "commit": lambda ids: [fields(id=ids.sequence, token_ids=TOKENS)],
    "renew_lease": lambda ids: [
        fields(id=ids.lease, lease_s=1),
        fields(id=ids.lease, lease_s=1, page_key=ids.page_key),
    ],
    "release_lease": lambda ids: [fields(id=ids.lease)],
    "pin": lambda ids: [fields(page_key=ids.page_key, soft_ttl_s=1)],
    "unpin": lambda ids: [fields(page_key=ids.page_key)],
    "evict": lambda ids: [fields(num_pages=100)],
    "clear": lambda ids: [fields()],
    "get_namespace": lambda ids: [fields(name="blue"), fields(name="none")],
    "set_namespace": lambda ids: [fields(name="blue", max_pages=1)],
    "delete_sequences": lambda ids: [
        fields(ids=[ids.sequence, ids.importing]),
        fields(prefix=ids.sequence[:4]),
    ],
    "events": lambda ids: [fields(after=0)],
    "export_sequence": lambda ids: [
        fields(id=ids.sequence),
        fields(id=ids.sequence, part=0, generation=ids.generation, before=DIGEST),
        fields(id=ids.importing),
    ],
    "import_sequence": lambda ids: [
        ({"id": ids.importing, "part": 0, "before": DIGEST, "digest": DIGEST}, part_rows())
    ],
    "get_import": lambda ids: [fields(id=ids.importing), fields(id=ids.sequence)],
    "cancel_import": lambda ids: [fields(id=ids.importing), fields(id=ids.sequence)],
    "engines": lambda ids: [fields()],
    "snapshot": lambda ids: [fields()],
    "claim": lambda ids: [fields(id=ids.sequence, epoch=1)],
    "hand_over": lambda ids: [
        *(fields(id=ids.sequence, state=state) for state in ("leaving", "gone", "back")),
        fields(id=ids.sequence, state="handed", generation=ids.generation),
    ],
    "drain_engine": lambda ids: [],
    "list_namespaces": lambda ids: [fields()],
    "holds": lambda ids: [fields()],
    "truncate_sequences": lambda ids: [fields(sequences=[ids.sequence], lengths=[0])],
    "commit_sequences": lambda ids: [
        fields(sequences=[ids.sequence], token_ids=TOKENS, names_indptr=[0, len(TOKENS)])
    ],
}
"""Of each operation the requests that name an id; none where it takes none."""


def part_rows() -> dict[str, Any]:
    n = LAYERS * 2 * PAGE_SIZE
    return {"k": of_value(1, n), "v": of_value(1, n)}


def key_of(namespace: str, *scopes: str) -> str:
    return f"a-key-of-{namespace}-{'-'.join(scopes)}"


@contextmanager
def holder(url: str, namespace: str, *scopes: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key_of(namespace, *scopes)}"}
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "a cluster of two"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    held = [(name, scopes) for name in ("red", "blue") for scopes in (SCOPES, *zip(SCOPES))]
    lines = [line_of(key_of(name, *scopes), name, scopes) for name, scopes in held]
    path.write_text("\n".join(lines))
    keys = ("--auth.keys-file", str(path))
    if request.param == 1:
        with serving(*keys) as service:
            yield service.url
    else:
        with listening(*keys, "--cluster.engines", "2") as (_, found):
            wait_for(lambda: is_ready(found), "the cluster", START_S)
            with holder(found, "blue", *SCOPES) as client:
                unknown = "/v1/sequences/unknown"
                wait_for(lambda: client.get(unknown).status_code == 404, "both engines", START_S)
            yield found


@pytest.fixture
def blue(url: str) -> Iterator[httpx.Client]:
    """Everything there is to name, all of blue's."""
    with holder(url, "blue", *SCOPES) as client:
        yield client
        client.delete("/v1/sequences/blue-gets-this/import")
        for held in client.get("/v1/prefix/holds").json()["holds"]:
            client.delete(f"/v1/leases/{held['lease']}")
        client.post("/v1/sequences/delete", json={"prefix": ""})
        client.post("/v1/prefix/clear", json={})


def make_all(blue: httpx.Client) -> tuple[Ids, Ids]:
    """What blue has, and as much that nobody has."""
    name, importing = "blue-owns-this", "blue-gets-this"
    create(blue, name)
    for layer in range(LAYERS):
        append(blue, layer, name, of_value(77, 2 * PAGE_SIZE), of_value(77, 2 * PAGE_SIZE))
    done = blue.post(f"/v1/sequences/{name}/commit", json={"token_ids": TOKENS}).json()
    found = blue.post("/v1/prefix/match", json={"token_ids": TOKENS, "lease_s": 60}).json()
    told, names = read_body(post(blue, f"/v1/sequences/{name}/export", {}))
    header = told["header"]
    beginning = {"header": header, "digest": told["digest"], "idle_s": 60}
    begun = post(blue, f"/v1/sequences/{importing}/import", beginning, names)
    assert begun.status_code == 200, begun.text
    lease, key = found["lease"]["id"], done["last_key"]
    mine = Ids(name, importing, lease, key, header["generation"])
    return mine, Ids("noneownsthis-x", "nonegetsthis-x", other(lease), other(key), "0f" * 16)


def other(text: str) -> str:
    """An id of the same form that nobody has: other digits at its end."""
    swap = str.maketrans("0123456789abcdef", "fedcba9876543210")
    at = max(len(text) - 12, 0)
    at = max(at, text.rfind("-") + 1, text.rfind(".") + 1)
    return text[:at] + text[at:].translate(swap)


def send(client: httpx.Client, operation: Operation, body: Body) -> httpx.Response:
    given, tensors = dict(body[0]), body[1]
    path = operation.path.format(**{name: given.pop(name) for name in operation.path_names})
    if operation.method in ("GET", "DELETE") or not operation.has_body:
        return client.request(operation.method, path, params=given)
    media = SAFETENSORS if operation.has_tensors else "application/json"
    headers = {"content-type": media}
    content = write_body(media, given, tensors)
    if not operation.has_tensors:
        return client.request(operation.method, path, json=given)
    return client.request(operation.method, path, content=content, headers=headers)


def masked(response: httpx.Response, ids: Ids) -> tuple[int, bytes]:
    """What a reply says, without the ids that the request named."""
    text = response.content
    for number, one in enumerate(ids.all):
        text = text.replace(one.encode(), b"id-%d" % number)
    return response.status_code, text.replace(ids.sequence[:4].encode(), b"name")


VOLATILE = {"pool", "info", "engines", "snapshot", "holds", "list_namespaces", "events"}
"""Answers that change by themselves, of callers who name nothing."""


def test_every_operation_is_tried() -> None:
    assert {one.name for one in OPERATIONS} == REQUESTS.keys()


@pytest.mark.parametrize("scope", SCOPES)
def test_what_another_namespace_has_is_as_if_it_were_not(
    url: str, blue: httpx.Client, scope: str
) -> None:
    mine, nobodys = make_all(blue)
    before = [blue.get(f"/v1/sequences/{mine.sequence}").json(), leased(blue)]
    with holder(url, "red", scope) as red:
        for operation in OPERATIONS:
            if operation.scope == scope == "admin":
                continue  # an operator is told of all namespaces
            for one, other in zip(
                REQUESTS[operation.name](mine), REQUESTS[operation.name](nobodys), strict=True
            ):
                reply, expected = send(red, operation, one), send(red, operation, other)
                where = (operation.name, one, reply.text, expected.text)
                is_right = reply.status_code != 422 or operation.name in (
                    "hand_over",
                    "renew_lease",
                )
                assert is_right and reply.status_code < 500, where
                may = {scope, "move"} if scope == "admin" else {scope}
                if operation.scope not in may and operation.appended_with not in one[1]:
                    assert reply.status_code == 403, where
                if operation.name not in VOLATILE and reply.status_code != 201:
                    assert masked(reply, mine) == masked(expected, nobodys), where
                for id in mine.all:
                    assert (
                        id not in str(one)
                        or reply.status_code >= 400
                        or operation.frees
                        or (operation.name in ("list_sequences", "match_prefix"))
                    ), where
                assert b"blue-owns" not in reply.content.replace(mine.sequence.encode(), b"")
    assert [blue.get(f"/v1/sequences/{mine.sequence}").json(), leased(blue)] == before
    assert blue.get(f"/v1/sequences/{mine.importing}/import").json()["state"] == "receiving"
    assert blue.post(f"/v1/leases/{mine.lease}", json={"lease_s": 60}).status_code == 200


def leased(client: httpx.Client) -> Any:
    found = client.get("/v1/prefix/holds").json()["holds"]
    return sorted((one["lease"] or "", one["page_key"]) for one in found)


def test_it_takes_as_long_to_be_told_that_nothing_is_there(url: str, blue: httpx.Client) -> None:
    mine, nobodys = make_all(blue)
    with holder(url, "red", *SCOPES) as red:
        for operation in OPERATIONS:
            if operation.name not in ("get_sequence", "gather", "export_sequence", "renew_lease"):
                continue
            took: dict[Ids, list[float]] = {mine: [], nobodys: []}
            for _ in range(60):
                for ids, times in took.items():
                    began = time.perf_counter()
                    send(red, operation, REQUESTS[operation.name](ids)[0])
                    times.append(time.perf_counter() - began)
            one, other = map(statistics.median, took.values())
            assert max(one, other) < 2 * min(one, other) + 1e-3, (operation.name, one, other)


VALUES = {"red": 11.0, "blue": 77.0}
TURNS = 250


def test_no_reply_has_a_value_of_another_namespace(url: str) -> None:
    """Pages change hands all the time: the pool is small, and sequences expire, are cut, evicted,
    exported, and handed over while their rows are read."""
    chance = random.Random(5)
    with holder(url, "red", *SCOPES) as red, holder(url, "blue", *SCOPES) as blue:
        for turn in range(TURNS):
            name, client = chance.choice([("red", red), ("blue", blue)])
            step(client, VALUES[name], f"s{turn % 7}", chance)
        for client in (red, blue):
            assert client.get("/v1/pool").json()["integrity"] == "ok"
            client.post("/v1/sequences/delete", json={"prefix": ""})
            client.post("/v1/prefix/clear", json={})


def step(client: httpx.Client, value: float, name: str, chance: random.Random) -> None:
    """Something that makes pages change hands, and something that reads them."""
    new = {"id": name, "ttl_s": chance.choice([0.05, 0.3, 5])}
    post(client, "/v1/sequences", {"sequences": [new]}, media="application/json")
    n = chance.randrange(1, 40)
    rows = {"k": of_value(value, n), "v": of_value(value, n)}
    for layer in range(LAYERS):
        where = {"layer": layer, "sequences": [name], "append_indptr": [0, n]}
        check(post(client, "/v1/append", where, rows), value)
    tokens = [chance.randrange(3) for _ in range(n)]
    path = f"/v1/sequences/{name}"
    match chance.randrange(6):
        case 0:
            client.post(f"{path}/truncate", json={"length": chance.randrange(n)})
        case 1:
            client.post(f"{path}/commit", json={"token_ids": tokens})
        case 2:
            client.post("/v1/prefix/evict", json={"num_pages": 5})
        case 3:
            header = post(client, f"{path}/export", {})
            if header.status_code == 200:
                told = read_body(header)[0]
                generation = told["header"]["generation"]
                handed = {"state": "handed", "generation": generation, "for_s": 0.001}
                client.post(f"{path}/hand-over", json={"state": "leaving", "for_s": 0.5})
                client.post(f"{path}/hand-over", json=handed)
                part = {"part": 0, "generation": generation, "before": told["digest"]}
                check(post(client, f"{path}/export", part), value)
        case 4:
            client.delete(path)
        case _:
            fork = {"parent": name, "length": chance.randrange(n + 1)}
            client.post("/v1/sequences", json={"sequences": [{**fork, "ttl_s": 0.2}]})
    for layer in range(LAYERS):
        where = {"layer": layer, "sequences": [name]}
        check(post(client, "/v1/gather", where), value)
        q = np.random.default_rng(1).standard_normal((1, QO_HEADS, HEAD_DIM)).astype(WIRE_DTYPE)
        check(post(client, "/v1/decode", where, {"q": q}), value)


def check(response: httpx.Response, value: float) -> None:
    """Whatever rows a reply has, they are its caller's."""
    assert response.status_code != 500, response.text
    if response.status_code != 200 or response.headers["content-type"] != SAFETENSORS:
        return
    for name, array in read_body(response)[1].items():
        if name in ("k", "v", "o") and array.size:
            numbers = array.astype(np.float64)
            near = np.isclose(numbers, value, rtol=1e-2) | (numbers == 0)
            assert near.all(), (name, numbers[~near][:8], value)
