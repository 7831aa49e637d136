"""Images of hostile callers: right requests of every operation, broken in their bytes or fields."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from service.engine.handlers.exports import header_digest
from service.operations.examples import bodies
from service.operations.table import OPERATIONS
from service.operations.transfer import Header
from tests.operations.declared import INFO as DECLARED

INFO: Final = DECLARED.model_copy(update={"num_kv_heads": 1, "head_dim": 2})
EXAMPLES: Final = bodies(1, 2, 4)
"""The operations' examples for that geometry and pages of 4."""

EXPORTED: Final = Header(
    generation="0" * 32,
    num_layers=2,
    page_size=4,
    num_kv_heads=1,
    head_dim=2,
    dtype="fp32",
    layout="NHD",
    k_scale=1.0,
    v_scale=1.0,
    lengths=[5, 6],
    ttl_s=None,
    num_named=0,
    cache_salt="",
    part_bytes=256,
    num_parts=1,
)
HEADER: Final = {"header": EXPORTED.model_dump(), "digest": header_digest(EXPORTED, {}).hex()}
"""How an import begins."""

PLAIN: Final[dict[str, dict[str, Any]]] = {
    "create_sequences": {
        "sequences": [
            {"id": "a", "ttl_s": 1.0},
            {"parent": "a", "length": 1},
            {"prefix": {"token_ids": [1, 2, 3, 4], "cache_salt": "a"}},
        ]
    },
    "list_sequences": {"after": "a", "limit": 10},
    "get_sequence": {"id": "a"},
    "delete_sequence": {"id": "a"},
    "truncate": {"id": "a", "length": 0},
    "page_table": {"sequences": ["a", "b"], "layer": 1},
    "info": {},
    "pool": {},
    "engines": {},
    "list_namespaces": {},
    "holds": {},
    "drain_engine": {"name": "engine", "stop": True},
    "delete_sequences": {"ids": ["a", "c"]},
    "match_prefix": {"token_ids": [1, 2, 3, 4, 5, 6], "lease_s": 0.0, "cache_salt": "a"},
    "commit": {"id": "a", "token_ids": [1, 2], "priority": 3, "duration_s": 1.0},
    "renew_lease": {"id": "a", "lease_s": 1.0},
    "release_lease": {"id": "a"},
    "pin": {"page_key": "0" * 32, "soft_ttl_s": 1.0},
    "unpin": {"page_key": "0" * 32, "cache_salt": ""},
    "evict": {"num_pages": 1},
    "clear": {},
    "get_namespace": {"name": "a"},
    "set_namespace": {"name": "spare", "max_pages": 9, "reserved_pages": 1},
    "events": {"after": 0, "limit": 9},
    "export_sequence": {"id": "a", "part_bytes": 64},
    "import_sequence": {"id": "moved", "idle_s": 5.0, **HEADER},
    "get_import": {"id": "moved"},
    "cancel_import": {"id": "moved"},
    "snapshot": {},
}
VALUES: Final = (
    *(None, True, False, -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**30, 0.5, 1e400),
    *("", "a", "b", "a\n", "\ud800", "\0", "x" * 129, "F32", "BOOL", "U8", "F64", "2", "never"),
    *([], [0], [0, 1], [0, 2], [1, 0], [-1], [0] * 9, [2**62] * 3, ["a", "a"], [[]], {}, {"a": 1}),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A body that is sent to an operation."""

    operation: str
    body: bytes


def right_request(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], bytes]:
    """An operation, its fields, the tensors of its header, and their bytes."""
    operation = rng.choice(OPERATIONS)
    example = PLAIN.get(operation.name) or EXAMPLES.get(operation.name, {})
    document = json.loads(json.dumps(example))
    tensors = document.pop("tensors", {})
    if "q" in tensors and operation.name.endswith("prefill") and rng.random() < 0.5:
        name = rng.choice(("mask", "packed_mask"))
        dtype = "BOOL" if name == "mask" else "U8"
        tensors[name] = {"dtype": dtype, "shape": [1], "data": [1]}
    entries, data = {}, b""
    for name, tensor in tensors.items():
        wide = tensor["dtype"] == "F32"
        values = [v if isinstance(v, (int, float)) else 0.0 for v in tensor["data"]]
        piece = struct.pack(f"<{len(values)}{'f' if wide else 'B'}", *values)
        span = [len(data), len(data) + len(piece)]
        entries[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": span}
        data += piece
    return operation.name, document, entries, data


def broken_image(seed: int) -> Case:
    """A request of some operation, most with a flaw or two; the same for the same seed."""
    rng = random.Random(seed)
    name, fields, entries, data = right_request(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        change(rng, rng.choice((fields, entries)))
    key = "request" if rng.random() < 0.98 else "response"
    header = {"__metadata__": {key: json.dumps(fields)}, **entries}
    if rng.random() < 0.05:
        change(rng, header)
    text = json.dumps(header).encode()
    body = bytearray(struct.pack("<Q", len(text)) + text + data)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        rng.choice(DAMAGES)(rng, body)
    return Case(name, bytes(body))


def change(rng: random.Random, document: Any) -> None:
    """Replaces, drops or adds a value somewhere inside."""
    here = document
    while isinstance(here, (dict, list)) and here:
        keys = list(here) if isinstance(here, dict) else range(len(here))
        key = rng.choice(keys)
        if isinstance(here[key], (dict, list)) and here[key] and rng.random() < 0.7:
            here = here[key]
            continue
        if rng.random() < 0.2:
            del here[key]
        else:
            here[key] = copy.deepcopy(rng.choice(VALUES))
        return
    if isinstance(here, dict):
        here[rng.choice(("x", "q", "layer", "sequences", "offsets"))] = copy.deepcopy(
            rng.choice(VALUES)
        )


def flip(rng: random.Random, body: bytearray) -> None:
    if body:
        body[rng.randrange(len(body))] = rng.randrange(256)


def cut(rng: random.Random, body: bytearray) -> None:
    at = rng.randrange(len(body) + 1)
    del body[at : at + rng.randrange(1, 16)]


def insert(rng: random.Random, body: bytearray) -> None:
    at = rng.randrange(len(body) + 1)
    body[at:at] = rng.choice((b"[", b"{", b'"', b",", b"\\", b"\0", b"\xff", b"1e9", b"[]," * 400))


def relabel(rng: random.Random, body: bytearray) -> None:
    """Another header length."""
    near = int.from_bytes(body[:8], "little") + rng.randrange(-9, 10)
    length = rng.choice((near, 0, 1, 2**18, 2**18 + 1, 2**32, 2**63, 2**64 - 1))
    body[:8] = struct.pack("<Q", length % 2**64)


DAMAGES: Final[tuple[Callable[[random.Random, bytearray], None], ...]] = (
    flip,
    cut,
    insert,
    relabel,
)
