"""One document of 200,000 tokens over two engines, and eight readers of it.

    python examples/long_document.py

The document is sharded: page i is on engine i mod 2, so each engine holds half of it. Each reader
forks it, which copies nothing, appends its own question and decodes. Every query goes to both
engines, each attends to its own pages, and the cluster's door merges the states. The results are
compared with dense attention in float64.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from attnd import Client, NewSequence
from local_service import open_client
from numpy.typing import NDArray

KV_HEADS, QUERY_HEADS, HEAD_DIM, PAGE_SIZE = 2, 4, 32, 64
TOKENS, CHUNK, READERS, QUESTION, STEPS = 200_000, 8_192, 8, 5, 3
ENGINES = 2
SETTINGS = {
    "cluster.engines": ENGINES,
    "pool.num-layers": 1,
    "pool.num-kv-heads": KV_HEADS,
    "pool.head-dim": HEAD_DIM,
    "pool.page-size": PAGE_SIZE,
    "pool.num-pages": TOKENS // PAGE_SIZE // ENGINES + 64,
    "pool.dtype": "fp32",
    "backend.kind": "cpu",
}
BOUND = 1e-5

Rows = NDArray[np.float32]
RNG = np.random.default_rng(200)


def rows(count: int, heads: int) -> Rows:
    return RNG.standard_normal((count, heads, HEAD_DIM)).astype(np.float32)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    k, v = rows(TOKENS, KV_HEADS), rows(TOKENS, KV_HEADS)
    with open_client(None, SETTINGS) as client:
        while len(client.engines()) < ENGINES:  # the cluster is ready with its first engine
            time.sleep(0.1)
        write(client, k, v)
        readers = [NewSequence(parent="document") for _ in range(READERS)]
        names = [made.id for made in client.create_sequences(readers)]
        before = client.pool()
        error = read(client, names, k, v)
        after = client.pool()
    print(f"{READERS} readers, a question of {QUESTION} tokens and {STEPS} more each: ", end="")
    print(f"{after.referenced - before.referenced} pages more")
    print(f"against dense float64: o and lse differ by at most {error:.1e}")
    if not error <= BOUND:  # nor may it be NaN
        raise SystemExit(f"FAILED: they may differ by {BOUND:g}")


def write(client: Client, k: Rows, v: Rows) -> None:
    """Append the document in chunks."""
    client.create_sequence("document", ranks=ENGINES)
    for begin in range(0, TOKENS, CHUNK):
        part = slice(begin, begin + CHUNK)
        count = len(k[part])
        client.append(0, ["document"], k[part], v[part], append_indptr=[0, count], offsets=[begin])
    reply = client.get_sequence("document")
    held = [engine.referenced for engine in client.engines()]
    print(f"document: {reply.length} tokens in {reply.pages} pages, by engine {held}, ", end="")
    print(f"of {SETTINGS['pool.num-pages']} in each pool")


def read(client: Client, names: list[str], k: Rows, v: Rows) -> float:
    """All readers' questions in one prefill, then decodes; returns the largest error."""
    indptr = np.arange(READERS + 1) * QUESTION
    keys = [(k, v)] * READERS
    count = READERS * QUESTION
    q, new = rows(count, QUERY_HEADS), [rows(count, KV_HEADS) for _ in "kv"]
    reply = client.prefill(0, names, q, qo_indptr=indptr, causal=True, k=new[0], v=new[1])
    keys = [grown(keys[i], new, indptr[i], indptr[i + 1]) for i in range(READERS)]
    print(f"prefill: {reply.levels} levels, the document read once at each engine: {reply.cascade}")
    last = indptr[1:] - 1  # the last row of each question attends to all keys
    errors = [worst(q[last], keys, reply.o[last], reply.lse[last])]
    one_each = np.arange(READERS + 1)
    for _ in range(STEPS):
        q, new = rows(READERS, QUERY_HEADS), [rows(READERS, KV_HEADS) for _ in "kv"]
        reply = client.decode(0, names, q, k=new[0], v=new[1])
        keys = [grown(keys[i], new, one_each[i], one_each[i + 1]) for i in range(READERS)]
        errors.append(worst(q, keys, reply.o, reply.lse))
    return float(np.max(errors))


def grown(held: tuple[Rows, Rows], new: list[Rows], begin: int, end: int) -> tuple[Rows, Rows]:
    """A reader's k and v, followed by its new rows."""
    k, v = (np.concatenate((old, part[begin:end])) for old, part in zip(held, new, strict=True))
    return k, v


def worst(q: Rows, keys: list[tuple[Rows, Rows]], o: Rows, lse: Rows) -> float:
    """The largest difference from dense attention, over a row of each reader."""
    errors = []
    for row, (k, v) in enumerate(keys):
        for head in range(QUERY_HEADS):
            own = head * KV_HEADS // QUERY_HEADS
            scores = k[:, own].astype(np.float64) @ q[row, head] * HEAD_DIM**-0.5
            top = scores.max()
            weights = np.exp(scores - top)
            wanted = weights @ v[:, own] / weights.sum()
            errors.append(np.abs(o[row, head] - wanted).max())
            errors.append(abs(lse[row, head] - (top + np.log(weights.sum()))))
    return float(np.max(errors))


if __name__ == "__main__":
    main()
