"""Namespaces do not see each other: every operation, by a key of every scope, on another's ids,
over HTTP and over the road."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np
import pytest
from attnd import Client, ServiceError, Session
from attnd.calls.call import Call
from http_messages import (
    HEAD_DIM,
    JSON,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    QO_HEADS,
    SAFETENSORS,
    WIRE_DTYPE,
    read_body,
    write_body,
)
from http_process import listening
from http_secrets import bearer, keys_file
from http_service import ARGUMENTS, serving

from service.operations.table import BY_NAME, OPERATIONS
from service.tenants import SCOPES
from tests.harness.plain_http import http_client

TOKENS = list(range(101, 101 + 2 * PAGE_SIZE))
DIGEST = "0f" * 32
Body = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ids:
    """What one may name: another namespace's, or one that does not exist. All are as long."""

    sequence: str
    importing: str
    lease: str
    page_key: str
    generation: str
    record: str

    @property
    def all(self) -> tuple[str, ...]:
        names = (self.sequence, self.importing, self.lease, self.page_key, self.generation)
        return (*names, self.record)


def of_value(value: float, n: int = 1, heads: int = KV_HEADS) -> Any:
    return np.full((n, heads, HEAD_DIM), value, WIRE_DTYPE)


def fields(**given: Any) -> Body:
    return given, {}


def attend(ids: Ids) -> Body:
    return {"layer": 0, "sequences": [ids.sequence]}, {"q": of_value(1, 1, QO_HEADS)}


def record(ids: Ids, value: int | None = None, **more: Any) -> Body:
    """A request for a record, with the bytes to store if there is a value."""
    key = np.frombuffer(ids.record.encode(), np.uint8)
    tensors = {"keys": key, "key_lens": np.array([key.size], np.uint8)}
    if value is not None:
        tensors |= {"values": np.full(100, value, np.uint8), "sizes": np.array([100])}
    return {"stamp": "model", **more}, tensors


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
    "prefetch": lambda ids: [fields(token_ids=TOKENS), fields(page_keys=[ids.page_key])],
    "commit": lambda ids: [fields(id=ids.sequence, token_ids=TOKENS)],
    "renew_lease": lambda ids: [fields(id=ids.lease, lease_s=1)],
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
    "drain_engine": lambda ids: [],
    "list_namespaces": lambda ids: [fields()],
    "holds": lambda ids: [fields()],
    "truncate_sequences": lambda ids: [fields(sequences=[ids.sequence], lengths=[0])],
    "commit_sequences": lambda ids: [
        fields(sequences=[ids.sequence], token_ids=TOKENS, names_indptr=[0, len(TOKENS)])
    ],
    "contains_records": lambda ids: [record(ids), record(ids, job=ids.lease, lease_s=1)],
    "put_records": lambda ids: [record(ids, 11)],
    "get_records": lambda ids: [record(ids)],
    "touch_records": lambda ids: [record(ids)],
    "delete_records": lambda ids: [record(ids)],
    "clear_records": lambda ids: [fields()],
    "release_records": lambda ids: [fields(id="job-of-blue"), fields(id=ids.lease)],
}
"""Of each operation the requests that name an id; none where it takes none."""


def part_rows() -> dict[str, Any]:
    n = LAYERS * 2 * PAGE_SIZE
    return {"k": of_value(1, n), "v": of_value(1, n)}


def key_of(namespace: str, *scopes: str) -> str:
    return f"a-key-of-{namespace}-{'-'.join(scopes)}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of either way in. `text` holds all of it but the tensors' bytes."""

    status: int
    text: bytes
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.status < 400


Ask = Callable[[str, Body], Reply]
"""Calls an operation by its name, with the key of one caller."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service. `socket` is set where its callers come over the road."""

    url: str
    socket: str | None = None
    has_records: bool = True

    @contextmanager
    def caller(self, namespace: str, *scopes: str) -> Iterator[Ask]:
        key = key_of(namespace, *scopes)
        if self.socket is not None:
            with Session(self.socket, api_key=key, retries=0) as session:
                yield lambda name, body: over_road(session, name, body)
        else:
            with http_client(self.url, bearer(key)) as client:
                yield lambda name, body: over_http(client, name, body)


def over_http(client: httpx.Client, name: str, body: Body) -> Reply:
    operation, given, tensors = BY_NAME[name], dict(body[0]), body[1]
    path = operation.path.format(**{one: given.pop(one) for one in operation.path_names})
    if not operation.has_body:
        response = client.request(operation.method, path, params=given)
    else:
        media = SAFETENSORS if operation.has_tensors else JSON
        content = json.dumps(given).encode()
        if operation.has_tensors:
            content = write_body(media, given, tensors)
        headers = {"content-type": media}
        response = client.request(operation.method, path, content=content, headers=headers)
    if response.status_code >= 400 or not response.content:
        return Reply(response.status_code, response.content)
    fields, arrays = read_body(response)
    return Reply(response.status_code, json.dumps(fields).encode(), fields, arrays)


def over_road(session: Session, name: str, body: Body) -> Reply:
    try:
        answer = session.send(Call(name, lambda reply: reply, False, *body))
    except ServiceError as error:
        return Reply(error.status, json.dumps(error.problem).encode())
    tensors = {name: np.array(array) for name, array in answer.tensors.items()}
    return Reply(answer.status, json.dumps(answer.fields).encode(), answer.fields, tensors)


RECORDS: Final = ("--cache.host-bytes", "8MiB", "--cache.records-share", "1.0")
LONG: Final = [
    pytest.param(name, marks=pytest.mark.long) for name in ("a cluster of two", "embedded")
]


@pytest.fixture(scope="module", params=["one engine", "over the road", *LONG])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    held = [(name, scopes) for name in ("red", "blue") for scopes in (SCOPES, *zip(SCOPES))]
    named = {key_of(name, *scopes): (name, scopes) for name, scopes in held}
    keys = keys_file(tmp_path_factory.mktemp("keys"), named)
    if request.param == "a cluster of two":
        with listening(*keys, "--cluster.engines", "2") as (_, url):
            yield Service(url, has_records=False)
    elif request.param == "embedded":
        from attnd.torch import EmbeddedSession

        words = [word.removeprefix("--") for word in (*ARGUMENTS, *keys, *RECORDS)]
        settings = dict(zip(words[::2], words[1::2], strict=True))
        key = next(iter(named))
        with EmbeddedSession(settings, serve_port=0, api_key=key) as session:
            with Client(session.url, api_key=key) as client:
                client.wait_ready(60)
            yield Service(str(session.url))
    else:
        with serving(*keys, *RECORDS) as found:
            is_road = request.param == "over the road"
            yield Service(found.url, found.engine_socket if is_road else None)


@pytest.fixture
def blue(service: Service) -> Iterator[Ask]:
    """A caller with all of blue's rights; its sequences are deleted at the end."""
    with service.caller("blue", *SCOPES) as ask:
        yield ask
        ask("cancel_import", fields(id="blue-gets-this"))
        ask("clear_records", fields())
        for held in ask("holds", fields()).fields["holds"]:
            ask("release_lease", fields(id=held["lease"]))
        delete_all(ask)


def delete_all(ask: Ask) -> None:
    assert ask("delete_sequences", fields(prefix="")).is_ok
    assert ask("clear", fields()).is_ok


def good(reply: Reply) -> Mapping[str, Any]:
    """The fields of a reply that must be no error."""
    assert reply.is_ok, reply
    return reply.fields


def make_all(blue: Ask, has_records: bool) -> tuple[Ids, Ids]:
    """Ids of blue's, and as many that do not exist."""
    name, importing = "blue-owns-this", "blue-gets-this"
    good(blue("create_sequences", fields(sequences=[{"id": name}])))
    n = 2 * PAGE_SIZE
    for layer in range(LAYERS):
        where = {"layer": layer, "sequences": [name], "append_indptr": [0, n]}
        good(blue("append", (where, {"k": of_value(77, n), "v": of_value(77, n)})))
    done = good(blue("commit", fields(id=name, token_ids=TOKENS)))
    found = good(blue("match_prefix", fields(token_ids=TOKENS, lease_s=60)))
    exported = blue("export_sequence", fields(id=name))
    header = good(exported)["header"]
    beginning = {"id": importing, "header": header, "digest": exported.fields["digest"]}
    good(blue("import_sequence", (beginning | {"idle_s": 60}, dict(exported.tensors))))
    lease, key = found["lease"]["id"], done["last_key"]
    mine = Ids(name, importing, lease, key, header["generation"], "blue-stored-it")
    nobodys = (
        "noneownsthis-x",
        "nonegetsthis-x",
        other(lease),
        other(key),
        "0f" * 16,
        "nonestoredthis",
    )
    if has_records:
        assert good(blue("put_records", record(mine, 77)))["outcomes"] == ["stored"]
        good(blue("contains_records", record(mine, job="job-of-blue", lease_s=60)))
    return mine, Ids(*nobodys)


def other(text: str) -> str:
    """An id of the same form that does not exist: other digits at its end."""
    swap = str.maketrans("0123456789abcdef", "fedcba9876543210")
    at = max(len(text) - 12, 0)
    at = max(at, text.rfind("-") + 1, text.rfind(".") + 1)
    return text[:at] + text[at:].translate(swap)


def masked(reply: Reply, ids: Ids) -> tuple[int, bytes, dict[str, bytes]]:
    """All that a reply says, without the ids that the request named."""
    text = reply.text
    for number, one in enumerate(ids.all):
        text = text.replace(one.encode(), b"id-%d" % number)
    tensors = {name: array.tobytes() for name, array in reply.tensors.items()}
    return reply.status, text.replace(ids.sequence[:4].encode(), b"name"), tensors


VOLATILE: Final = {"pool", "info", "engines", "snapshot", "holds", "list_namespaces", "events"}
"""Operations whose replies change by themselves; their requests name nothing."""
NAMELESS: Final = {
    *("list_sequences", "match_prefix", "prefetch"),
    *("contains_records", "put_records", "get_records", "touch_records"),
}
"""Operations that succeed whatever ids the request has."""


def test_every_operation_is_tried() -> None:
    assert {one.name for one in OPERATIONS} == REQUESTS.keys()


@pytest.mark.parametrize("scope", SCOPES)
def test_ids_of_another_namespace_are_answered_like_unknown_ids(
    service: Service, blue: Ask, scope: str
) -> None:
    mine, nobodys = make_all(blue, service.has_records)
    before = state_of(blue, mine)
    with service.caller("red", scope) as red:
        for operation in OPERATIONS:
            if operation.scope == scope == "admin":
                continue  # an operator sees all namespaces
            requests = REQUESTS[operation.name]
            for body, unknown in zip(requests(mine), requests(nobodys), strict=True):
                reply, expected = red(operation.name, body), red(operation.name, unknown)
                where = (operation.name, body, reply, expected)
                assert reply.status != 422, where
                is_refused = operation.tag == "records" and not service.has_records
                assert reply.status < 500 or (is_refused and reply.status == 501), where
                if operation.scope != scope and operation.appended_with not in body[1]:
                    assert reply.status == 403, where
                if operation.name not in VOLATILE and reply.status != 201:
                    assert masked(reply, mine) == masked(expected, nobodys), where
                if any(one in str(body) for one in mine.all):
                    is_right = operation.frees or operation.name in NAMELESS
                    assert not reply.is_ok or is_right, where
                assert b"blue-owns" not in reply.text.replace(mine.sequence.encode(), b""), where
    assert state_of(blue, mine) == before


def state_of(blue: Ask, ids: Ids) -> list[Any]:
    """What its owner sees of all that `ids` name."""
    found = good(blue("holds", fields()))["holds"]
    held = sorted((one["lease"] or "", one["page_key"]) for one in found)
    importing = good(blue("get_import", fields(id=ids.importing)))["state"]
    good(blue("renew_lease", fields(id=ids.lease, lease_s=60)))
    stored = blue("get_records", record(ids))
    values = stored.tensors["values"].tobytes() if stored.is_ok else b""
    return [values, good(blue("get_sequence", fields(id=ids.sequence))), held, importing]


TIMED: Final = ("get_sequence", "gather", "export_sequence", "renew_lease")
ROUNDS: Final = 40


@pytest.mark.timing
@pytest.mark.parametrize("operation", TIMED)
def test_an_id_of_another_namespace_takes_as_long_as_an_unknown_one(
    service: Service, blue: Ask, operation: str
) -> None:
    """Compares lower quartiles of interleaved calls: a busy machine delays the others."""
    mine, nobodys = make_all(blue, service.has_records)
    took: dict[Ids, list[float]] = {mine: [], nobodys: []}
    with service.caller("red", *SCOPES) as red:
        for turn in range(ROUNDS):
            for ids in (mine, nobodys) if turn % 2 else (nobodys, mine):
                began = time.perf_counter()
                red(operation, REQUESTS[operation](ids)[0])
                took[ids].append(time.perf_counter() - began)
    one, other = (statistics.quantiles(times)[0] for times in took.values())
    assert max(one, other) < 2 * min(one, other) + 1e-3, (one, other)


VALUES: Final = {"red": 11.0, "blue": 77.0}
TURNS: Final = 120


def test_no_reply_has_a_value_of_another_namespace(service: Service) -> None:
    """Pages change hands all the time: the pool is small, and sequences expire, are cut, evicted,
    exported, and transferred while their rows are read."""
    chance = random.Random(5)
    with service.caller("red", *SCOPES) as red, service.caller("blue", *SCOPES) as blue:
        read = dict.fromkeys(VALUES, 0)
        for turn in range(TURNS):
            name, ask = chance.choice([("red", red), ("blue", blue)])
            read[name] += step(ask, VALUES[name], f"s{turn % 7}", chance)
        for ask in (red, blue):
            assert good(ask("pool", fields()))["integrity"] == "ok"
            delete_all(ask)
    assert min(read.values()) > TURNS // 4, read


def step(ask: Ask, value: float, name: str, chance: random.Random) -> int:
    """Make pages change hands, and read them; returns how many replies had rows."""
    ask(
        "create_sequences", fields(sequences=[{"id": name, "ttl_s": chance.choice([0.05, 0.3, 5])}])
    )
    n, num_read = chance.randrange(1, 40), 0
    rows = {"k": of_value(value, n), "v": of_value(value, n)}
    for layer in range(LAYERS):
        ask("append", ({"layer": layer, "sequences": [name], "append_indptr": [0, n]}, rows))
    match chance.randrange(6):
        case 0:
            ask("truncate", fields(id=name, length=chance.randrange(n)))
        case 1:
            tokens = [chance.randrange(3) for _ in range(n)]
            ask("commit", fields(id=name, token_ids=tokens))
        case 2:
            ask("evict", fields(num_pages=5))
        case 3:
            num_read += export(ask, value, name)
        case 4:
            ask("delete_sequence", fields(id=name))
        case _:
            fork = {"parent": name, "length": chance.randrange(n + 1), "ttl_s": 0.2}
            ask("create_sequences", fields(sequences=[fork]))
    q = np.random.default_rng(1).standard_normal((1, QO_HEADS, HEAD_DIM)).astype(WIRE_DTYPE)
    for layer in range(LAYERS):
        where = {"layer": layer, "sequences": [name]}
        num_read += has_only(ask("gather", (where, {})), value)
        num_read += has_only(ask("decode", (where, {"q": q})), value)
    return num_read


def export(ask: Ask, value: float, name: str) -> int:
    """Export a sequence's first part."""
    exported = ask("export_sequence", fields(id=name))
    if not exported.is_ok:
        return 0
    generation = exported.fields["header"]["generation"]
    part = {"part": 0, "generation": generation, "before": exported.fields["digest"]}
    return has_only(ask("export_sequence", fields(id=name, **part)), value)


def has_only(reply: Reply, value: float) -> bool:
    """Whether a reply has rows, which must be its caller's."""
    assert reply.status != 500, reply
    found = [array for name, array in reply.tensors.items() if name in ("k", "v", "o")]
    for array in found:
        numbers = array.astype(np.float64)
        near = np.isclose(numbers, value, rtol=1e-2) | (numbers == 0)
        assert near.all(), (numbers[~near][:8], value)
    return any(array.size for array in found)
