"""Create a sequence, append to it, fork it, decode all forks at once, and see what sharing saved.

    python examples/quickstart.py [--url http://127.0.0.1:8080]

Without --url it starts a service of its own. With it, K and V get the shape that service has.
"""

from __future__ import annotations

import argparse

import numpy as np
from attnd import Client, LengthMismatch, NewSequence
from local_service import metric, open_client

SETTINGS = {
    "pool.num-layers": 2,
    "pool.num-kv-heads": 2,
    "pool.head-dim": 64,
    "pool.page-size": 16,
    "pool.num-pages": 256,
    "pool.dtype": "fp16",
}
PROMPT_TOKENS = 1000
FORKS = 4
QUERY_HEADS_PER_KV_HEAD = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a running service; default: start one")
    with open_client(parser.parse_args().url, SETTINGS) as client:
        show(client)


def show(client: Client) -> None:
    info = client.info()
    print(f"attnd {info.version}, {info.backend} on {info.device}")
    print(f"pool: {info.num_pages} pages of {info.page_size} tokens, {info.dtype}")
    rng = np.random.default_rng(0)

    def rows(count: int, heads: int) -> np.ndarray:
        return rng.standard_normal((count, heads, info.head_dim)).astype(np.float16)

    # A prompt: its K and V, layer by layer, as a model makes them.
    prompt = client.create_sequence().id
    for layer in range(info.num_layers):
        k, v = rows(PROMPT_TOKENS, info.num_kv_heads), rows(PROMPT_TOKENS, info.num_kv_heads)
        client.append(layer, [prompt], k, v, append_indptr=[0, PROMPT_TOKENS], offsets=[0])
    stored = client.get_sequence(prompt)
    print(f"prompt: {stored.length} tokens in {stored.pages} pages")

    # Forks share its full pages; the rows of the last, partial page are copied.
    forks = [fork.id for fork in client.create_sequences([NewSequence(parent=prompt)] * FORKS)]
    pool = client.pool()
    print(f"{FORKS} forks: {pool.referenced} pages in use, every token seen", end=" ")
    print(f"{pool.sharing_ratio:.2f} times")

    # One token for every fork: K and V are appended, then q attends everything before and them.
    saved = metric(client, "attnd_kv_bytes_saved_total")
    for layer in range(info.num_layers):
        result = client.decode(
            layer,
            forks,
            rows(FORKS, info.num_kv_heads * QUERY_HEADS_PER_KV_HEAD),
            k=rows(FORKS, info.num_kv_heads),
            v=rows(FORKS, info.num_kv_heads),
            offsets=[PROMPT_TOKENS] * FORKS,
        )
    print(f"decode: o {result.o.shape} {result.o.dtype}, lse {result.lse.shape}", end=", ")
    print(f"{result.levels} cascade levels, {result.meta.timings.get('kernel', 0) * 1e3:.2f} ms")
    saved = metric(client, "attnd_kv_bytes_saved_total") - saved
    print(f"KV bytes that sharing saved reading: {saved:.0f}")

    # The levels, as arrays: pages that all forks read once, then each fork's own.
    table = client.page_table(forks)
    for i, level in enumerate(table.levels):
        print(f"level {i}: qo_indptr {level.qo_indptr.tolist()}", end=", ")
        print(f"pages per segment {np.diff(level.kv_indptr).tolist()}")

    # A rejected call changes nothing; its error has the true length.
    try:
        kv = rows(1, info.num_kv_heads)
        client.append(0, [prompt], kv, kv, offsets=[PROMPT_TOKENS - 1])
    except LengthMismatch as error:
        print(f"rejected with {error.status} {error.code}: true length", end=" ")
        print(error.lengths[prompt])

    for sequence in [prompt, *forks]:
        client.delete_sequence(sequence)
    print(f"deleted: {client.pool().referenced} pages in use")


if __name__ == "__main__":
    main()
