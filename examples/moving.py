"""A sequence that moves: to a file, into another service, and to a third that has most of it.

    python examples/moving.py

The first half of the file is imported, as if the machine had failed, then the rest. Both services
decode the same bits afterwards.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from attnd import Client, InterruptedExport, Prefix, copy_sequence
from local_service import serve

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM, PAGE = 2, 2, 8, 64, 16
TOKENS = 1000
PART_BYTES = 2**16
SETTINGS = {
    "pool.num-layers": LAYERS,
    "pool.num-kv-heads": KV_HEADS,
    "pool.head-dim": HEAD_DIM,
    "pool.page-size": PAGE,
    "pool.num-pages": 256,
    "pool.dtype": "fp8_e4m3",
    "pool.k-scale": 0.02,
    "pool.v-scale": 0.02,
    "backend.kind": "cpu",
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with ExitStack() as stack:
        here, there = (
            stack.enter_context(Client(uds=stack.enter_context(serve(SETTINGS)))) for _ in range(2)
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make(here, "chat")
        through_a_file(here, there, folder / "chat.attnd")
        compare(here, there, "chat")
        copied(here, there)


def make(client: Client, name: str) -> None:
    """A sequence of random rows, its pages committed."""
    rng = np.random.default_rng(1)
    client.create_sequence(name)
    for layer in range(LAYERS):
        k, v = rng.standard_normal((2, TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float16)
        client.append(layer, [name], k, v, append_indptr=[0, TOKENS])
    client.commit(name, Prefix(range(TOKENS)))


def through_a_file(here: Client, there: Client, path: Path) -> None:
    header = here.export("chat", path, part_bytes=PART_BYTES)
    whole = path.read_bytes()
    print(f"exported {TOKENS} tokens in {header.num_parts} parts, {len(whole)} bytes")
    path.write_bytes(whole[: len(whole) // 2])
    try:
        there.import_("chat", path)
    except InterruptedExport:
        state = there.get_import("chat")
        print(f"half a file: {state.state}, part {state.next_part} of {state.num_parts} is next")
    path.write_bytes(whole)
    sent: list[int] = []
    there.import_("chat", path, progress=lambda done, _: sent.append(done))
    print(f"resumed: {len(sent)} parts sent, {there.get_sequence('chat').length} tokens")


def compare(here: Client, there: Client, name: str) -> None:
    """SystemExit unless both services answer the same attention, to the bit."""
    q = np.random.default_rng(2).standard_normal((1, QUERY_HEADS, HEAD_DIM)).astype(np.float16)
    for layer in range(LAYERS):
        one, other = here.decode(layer, [name], q), there.decode(layer, [name], q)
        if not (np.array_equal(one.o, other.o) and np.array_equal(one.lse, other.lse)):
            raise SystemExit("FAILED: the two services differ")
    print("both services decode the same, to the bit")


def copied(here: Client, there: Client) -> None:
    """The prefix cache of the other service has these pages by name: only the rest is sent."""
    free = there.pool().free
    state = copy_sequence(here, there, "chat", "chat-again", part_bytes=PART_BYTES)
    print(
        f"copied: {state.cached_len} tokens were cached there, {free - there.pool().free} page new"
    )


if __name__ == "__main__":
    main()
