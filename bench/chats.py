"""Chats that share prompts, grow, end and come back: something for the live page to show."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Final

import numpy as np
from attnd import Client, NewSequence, OutOfPages, Prefix
from numpy.typing import NDArray

LAYERS, HEADS, QO_HEADS, DIM = 2, 2, 8, 64
POOL: Final = (
    *("--pool.num-layers", str(LAYERS)),
    *("--pool.num-kv-heads", str(HEADS)),
    *("--pool.head-dim", str(DIM)),
)
PROMPTS: Final = (640, 480, 320, 320, 160)
"""Tokens of the prompts that chats begin with; the last one is pinned."""
SHARES: Final = (8, 6, 4, 2)
MOST_CHATS: Final = 40
PAUSE_S: Final = 0.02
BURST: Final = 360 * 16
"""Tokens of a prompt that comes now and then, and evicts others or finds no room."""


class Chats:
    """One client's chats; deterministic but for their timing."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.chance = random.Random(1)
        self.rng = np.random.default_rng(1)
        self.tokens: dict[str, list[int]] = {}
        self.chats: list[str] = []
        self.prompts = [self.prompt(length) for length in PROMPTS]
        pinned = self.prompts.pop()
        key = self.commit(pinned)
        if key is not None:
            client.pin(key, hard=True)
        client.delete_sequence(pinned)

    def rows(self, count: int, heads: int = HEADS) -> NDArray[np.float16]:
        return self.rng.standard_normal((count, heads, DIM)).astype(np.float16)

    def prompt(self, length: int) -> str:
        name = self.client.create_sequence().id
        self.tokens[name] = []
        self.say([name], length)
        self.commit(name)
        return name

    def say(self, names: list[str], count: int) -> None:
        """So many tokens more of each."""
        indptr = [count * at for at in range(len(names) + 1)]
        for layer in range(LAYERS):
            k = self.rows(count * len(names))
            self.client.append(layer, names, k, k, append_indptr=indptr)
        for name in names:
            self.tokens[name] += self.rng.integers(0, 50_000, count).tolist()

    def commit(self, name: str) -> str | None:
        return self.client.commit(name, Prefix(token_ids=self.tokens[name])).last_key

    def turn(self, number: int) -> None:
        """New chats, some tokens for some of them, ends, a burst."""
        if len(self.chats) < MOST_CHATS and number % 3 == 0:
            self.begin()
        if self.chats:
            some = self.chance.randint(1, max(1, len(self.chats) // 2))
            names = self.chats[-some:]  # those that are new; others have fallen silent
            self.say(names, self.chance.choice((1, 1, 1, 2, 16)))
            for layer in range(LAYERS):
                self.client.decode(layer, names, self.rows(len(names), QO_HEADS))
        if number % 9 == 0 and len(self.chats) > 12:
            for _ in range(4):
                self.end(self.chats.pop(self.chance.randrange(len(self.chats))))
        if number % 60 == 0:
            self.burst()

    def begin(self) -> None:
        old = self.chats[:4]
        parents = [*self.prompts, *old]
        (parent,) = self.chance.choices(parents, [*SHARES, *(3 for _ in old)])
        forks = [NewSequence(parent=parent)] * self.chance.randint(1, 5)
        for made in self.client.create_sequences(forks):
            self.chats.append(made.id)
            self.tokens[made.id] = list(self.tokens[parent])

    def end(self, name: str) -> None:
        """Most are kept in the cache."""
        if self.chance.random() < 0.7:
            self.commit(name)
        self.client.delete_sequence(name)
        del self.tokens[name]

    def burst(self) -> None:
        name = self.client.create_sequence().id
        self.tokens[name] = []
        try:
            self.say([name], BURST)
        finally:
            self.client.delete_sequence(name)


def chat(url: str, ends: threading.Event) -> None:
    """Turn after turn until the end."""
    with Client(url) as client:
        chats, number = Chats(client), 0
        while not ends.is_set():
            number += 1
            with contextlib.suppress(OutOfPages):
                chats.turn(number)
            time.sleep(PAUSE_S)
