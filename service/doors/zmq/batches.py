"""The cache's events in the format in which vLLM publishes its own."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

Layout = Literal["map", "array"]
"""An event's layout: named fields, or fields by position after the type's name."""
MEDIUM: Final = "GPU"
"""vLLM's name of the memory that attention reads."""
GROUP: Final = 0
"""vLLM's number of a KV cache group. A pool is one group: all layers store every token."""
KIND: Final = "full_attention"
"""vLLM's name of such a group's cache."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


def root_of(namespace: str) -> str:
    """The key before a prompt's first page, without a salt."""
    return blake2b(f"{namespace}\0".encode(), digest_size=16).hexdigest()


def payload(event: dict[str, Any], when: float, layout: Layout) -> bytes:
    """One event as a batch: [timestamp, [events], rank]. An event without a counterpart in
    vLLM is an empty batch, so that no sequence number is missing."""
    fields = fields_of(event)
    events = [] if fields is None else [fields if layout == "map" else list(fields.values())]
    return msgspec.msgpack.encode([when, events, 0])


def fields_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event by the names of vLLM's fields, in the order of vLLM's arrays."""
    match event["type"]:
        case "stored":
            parent = event["parent_key"]
            is_first = parent == root_of(event["namespace"])
            return {
                "type": "BlockStored",
                "block_hashes": hashes(event),
                "parent_block_hash": None if is_first else bytes.fromhex(parent),
                "token_ids": event.get("token_ids", []),
                "block_size": event["page_size"],
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
                "extra_keys": None,
                "group_idx": GROUP,
                "kv_cache_spec_kind": KIND,
            }
        case "removed":
            return {
                "type": "BlockRemoved",
                "block_hashes": hashes(event),
                "medium": MEDIUM,
                "group_idx": GROUP,
            }
        case "cleared":
            return {"type": "AllBlocksCleared"}
        case _:
            return None


def hashes(event: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(key) for key in event["page_keys"]]


def sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")
