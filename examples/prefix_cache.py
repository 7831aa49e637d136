"""A chat whose history grows: every turn finds the KV of the turns before in the prefix cache.

    python examples/prefix_cache.py [--url http://127.0.0.1:8080]

Every turn deletes its sequence. Without --url the example starts a service, and then two behind a
router, which knows from their events where a prompt is cached.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from attnd import Client, KeyMismatch, Prefix
from local_service import open_client

PAGE_SIZE = 16
SETTINGS = {
    "pool.num-layers": 2,
    "pool.num-kv-heads": 2,
    "pool.head-dim": 64,
    "pool.page-size": PAGE_SIZE,
    "pool.num-pages": 128,
    "pool.dtype": "fp16",
}
SYSTEM_TOKENS = 160
TURN_TOKENS = 70
TURNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a running service; default: start one")
    url = parser.parse_args().url
    with open_client(url, SETTINGS) as client:
        show(client)
    if url is None:
        with open_client(None, SETTINGS) as one, open_client(None, SETTINGS) as other:
            show_router(Router([one, other]))


def show(client: Client) -> None:
    rng = np.random.default_rng(0)
    system = [int(token) for token in rng.integers(0, 32_000, SYSTEM_TOKENS)]
    for chat in ("first", "second"):
        history = list(system)
        for turn in range(TURNS):
            history += [int(token) for token in rng.integers(0, 32_000, TURN_TOKENS)]
            cached = answer(client, history)
            share = cached / len(history)
            print(f"{chat} chat, turn {turn + 1}: {cached} of {len(history)} tokens cached", end="")
            print(f" ({share:.0%}), {len(history) - cached} computed")

    pool = client.pool()
    print(f"no sequences ({pool.sequences}), {pool.cached} pages cached, {pool.free} free")

    # A scheduler that plans ahead takes a lease, which prevents eviction until it ends.
    found = client.match_prefix(Prefix(token_ids=system), lease_s=30.0)
    print(f"leased: {found.matched_len} tokens; {client.clear()} other pages evicted")
    if found.lease is not None:
        client.release_lease(found.lease.id)

    # The system prompt is used all the time: evict it last.
    sequence = client.create_sequence(prefix=Prefix(token_ids=system)).id
    committed = client.commit(sequence, Prefix(token_ids=system), priority=90)
    try:
        client.commit(sequence, Prefix(token_ids=[7, *system[1:]]))
    except KeyMismatch as refused:
        print(f"{refused.status} {refused.code}: page {refused.page} has a name already")
    client.delete_sequence(sequence)
    if committed.last_key is not None:
        print(f"pinned: {client.pin(committed.last_key, soft_ttl_s=60.0)} pages")
    print(f"evicted in the end: {client.clear()} pages, {client.pool().free} free")


def answer(client: Client, history: list[int]) -> int:
    """One turn, which computes only missing tokens; returns the number of cached tokens."""
    info = client.info()
    prompt = Prefix(token_ids=history)
    sequence = client.create_sequence(prefix=prompt, ttl_s=60.0)
    missing = len(history) - sequence.cached_len
    for layer in range(info.num_layers):  # a model's forward pass over the missing tokens
        q, k, v = (
            np.random.standard_normal((missing, heads, info.head_dim)).astype(np.float16)
            for heads in (4 * info.num_kv_heads, info.num_kv_heads, info.num_kv_heads)
        )
        client.prefill(layer, [sequence.id], q, [0, missing], k=k, v=v, causal=True)
    client.commit(sequence.id, prompt)
    client.delete_sequence(sequence.id)
    return sequence.cached_len


class Router:
    """Sends a prompt to the service that has most of it cached, according to its events."""

    def __init__(self, services: Sequence[Client]) -> None:
        self.services = services
        self.cached: list[set[str]] = [set() for _ in services]
        self.heard = [0 for _ in services]
        """The last event that was read from each service."""

    def listen(self) -> None:
        """Read all new events. A busy router would iterate over `Client.events` in threads."""
        for at, service in enumerate(self.services):
            keys = self.cached[at]
            while True:
                page = service.event_page(self.heard[at])
                self.heard[at] = page.next
                if page.too_old:
                    keys.clear()
                for event in page.events:
                    if event.type == "stored":
                        keys.update(event.page_keys)
                    elif event.type == "removed":
                        keys.difference_update(event.page_keys)
                if not page.events:
                    break

    def choose(self, prompt: list[int]) -> int:
        """The service with the longest cached prefix; of equals, the one with fewer pages."""
        self.listen()
        keys = page_keys(prompt)
        found = [sum(key in cached for key in keys) for cached in self.cached]
        return max(range(len(found)), key=lambda at: (found[at], -len(self.cached[at])))


def page_keys(prompt: list[int]) -> list[str]:
    """The keys that a service gives to the prompt's full pages (docs/api.md)."""
    keys = []
    key = blake2b(b"default\0", digest_size=16).digest()
    for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
        ids = np.array(prompt[end - PAGE_SIZE : end], "<u4").tobytes()
        key = blake2b(key + ids, digest_size=16).digest()
        keys.append(key.hex())
    return keys


def show_router(router: Router) -> None:
    rng = np.random.default_rng(1)
    chats: dict[str, list[int]] = {"red": [], "blue": []}
    for turn in range(3):
        for name, history in chats.items():
            history += [int(token) for token in rng.integers(0, 32_000, TURN_TOKENS)]
            at = router.choose(history)
            cached = answer(router.services[at], history)
            print(f"{name} chat, turn {turn + 1}: to service {at}, ", end="")
            print(f"{cached} of {len(history)} tokens cached")
    router.services[0].clear()
    router.listen()
    print(f"service 0 was cleared: the router knows {[len(one) for one in router.cached]} pages")


if __name__ == "__main__":
    main()
