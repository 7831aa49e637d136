"""Explicit cascade: eight requests over a tree of KV three levels deep.

    python examples/cascade.py [--url http://127.0.0.1:8080]

    level 0      system (500 tokens)                        all eight requests
    level 1      doc-a (300)     doc-b (77)   doc-c (200)   three, two and three of them
    level 2      turn-0 … turn-2  turn-3 -4   turn-5 … -7   each its own, 1 to 40 tokens

Every node is a sequence of its own. One request attends all three levels and merges their states;
each level's own state comes back too, and merging those here gives the same answer.
"""

from __future__ import annotations

import argparse

import numpy as np
from attnd import CascadeLevel, Client, Info, merge_states
from local_service import open_client

SETTINGS = {
    "pool.num-layers": 1,
    "pool.num-kv-heads": 2,
    "pool.head-dim": 64,
    "pool.page-size": 16,
    "pool.num-pages": 128,
    "pool.dtype": "fp16",
}
REQUESTS = 8
DOCUMENTS = {"doc-a": 300, "doc-b": 77, "doc-c": 200}
TURNS = {f"turn-{i}": length for i, length in enumerate([1, 15, 16, 17, 40, 3, 32, 8])}
LENGTHS = {"system": 500, **DOCUMENTS, **TURNS}
LEVELS = [
    CascadeLevel(["system"], [0, REQUESTS]),
    CascadeLevel(list(DOCUMENTS), [0, 3, 5, 8]),
    CascadeLevel(list(TURNS), np.arange(REQUESTS + 1)),
]
QUERY_HEADS_PER_KV_HEAD = 4
BOUND = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a running service; default: start one")
    with open_client(parser.parse_args().url, SETTINGS) as client:
        show(client)


def show(client: Client) -> None:
    rng = np.random.default_rng(2)
    info = client.info()
    fill(client, info, rng)
    heads = info.num_kv_heads * QUERY_HEADS_PER_KV_HEAD
    q = rng.standard_normal((REQUESTS, heads, info.head_dim)).astype(np.float16)
    result = client.cascade(0, LEVELS, q, return_levels=True)
    for i, (level, state) in enumerate(zip(LEVELS, result.level_states, strict=True)):
        print(f"level {i}: qo_indptr {np.asarray(level.qo_indptr).tolist()}", end=", ")
        print(f"tokens {[LENGTHS[name] for name in level.sequences]}", end=", ")
        print(f"mean lse {state.lse.mean():.3f}")
    print(f"merged: o {result.o.shape}, mean lse {result.lse.mean():.3f}")
    merged = merge_states(result.level_states)
    difference = np.abs(merged.o.astype(np.float32) - result.o.astype(np.float32)).max()
    print(f"the levels' states merged here differ by at most {difference:.1e}")
    read = sum(LENGTHS.values())
    flat = sum(
        LENGTHS[name] * int(rows)
        for level in LEVELS
        for name, rows in zip(level.sequences, np.diff(level.qo_indptr), strict=True)
    )
    print(f"keys read: {read}, where flat decoding reads {flat}")
    for name in LENGTHS:
        client.delete_sequence(name)
    if not difference <= BOUND:  # nor may it be NaN
        raise SystemExit(f"FAILED: more than {BOUND}")


def fill(client: Client, info: Info, rng: np.random.Generator) -> None:
    """Create every node and append its K and V, all nodes in one request each."""
    for name in LENGTHS:
        client.create_sequence(name)
    indptr = np.cumsum([0, *LENGTHS.values()])
    shape = (int(indptr[-1]), info.num_kv_heads, info.head_dim)
    k, v = (rng.standard_normal(shape).astype(np.float16) for _ in "kv")
    client.append(0, list(LENGTHS), k, v, append_indptr=indptr, offsets=[0] * len(LENGTHS))


if __name__ == "__main__":
    main()
