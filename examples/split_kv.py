"""One long sequence's KV split over two services, decoded on both, merged here.

    python examples/split_kv.py

Each service answers the attention state `(o, lse)` over the keys it holds; states over disjoint
keys merge exactly, so the merged answer is that of one service that holds everything. It is
compared with one that does, and with a dense float64 computation.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import numpy as np
from attnd import AttentionState, Client, merge_states
from local_service import serve
from numpy.typing import NDArray

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM = 1, 2, 8, 64
TOKENS, SPLIT = 3000, 1777
SETTINGS = {
    "pool.num-layers": LAYERS,
    "pool.num-kv-heads": KV_HEADS,
    "pool.head-dim": HEAD_DIM,
    "pool.page-size": 16,
    "pool.num-pages": 512,
    "pool.dtype": "fp32",
    "backend.kind": "cpu",
}
BOUND = 1e-5

Rows = NDArray[np.float32]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((1, QUERY_HEADS, HEAD_DIM)).astype(np.float32)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Client(uds=stack.enter_context(serve(SETTINGS)))) for _ in range(2)
        )
        states = [
            decode(first, "head", q, k[:SPLIT], v[:SPLIT]),
            decode(second, "tail", q, k[SPLIT:], v[SPLIT:]),
        ]
        whole = decode(first, "whole", q, k, v)
    merged = merge_states(states)
    print(f"{SPLIT} keys on one service, {TOKENS - SPLIT} on another, merged in the client")
    compare("one service holding all", merged, whole)
    compare("dense float64", merged, dense(q, k, v))


def decode(client: Client, name: str, q: Rows, k: Rows, v: Rows) -> AttentionState:
    """The state of q over k and v, which this service stores as sequence `name`."""
    client.create_sequence(name)
    client.append(0, [name], k, v, append_indptr=[0, len(k)], offsets=[0])
    return client.decode(0, [name], q).state


def dense(q: Rows, k: Rows, v: Rows) -> AttentionState:
    """The same state, computed directly in float64."""
    group = QUERY_HEADS // KV_HEADS
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->qhk", q.astype(np.float64), keys) * HEAD_DIM**-0.5
    lse = np.logaddexp.reduce(scores, axis=-1)
    o = np.einsum("qhk,khd->qhd", np.exp(scores - lse[..., None]), values)
    return AttentionState(o, lse.astype(np.float32))


def compare(name: str, merged: AttentionState, other: AttentionState) -> None:
    """Print the largest differences; SystemExit if one is above the bound."""
    o, lse = np.abs(merged.o - other.o).max(), np.abs(merged.lse - other.lse).max()
    print(f"against {name}: o differs by at most {o:.1e}, lse by {lse:.1e}")
    if not (o <= BOUND and lse <= BOUND):
        raise SystemExit(f"FAILED: more than {BOUND}")


if __name__ == "__main__":
    main()
