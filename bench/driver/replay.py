"""A trace replayed on running services: every request begins from the prefix cache, is prefilled
and committed, decodes some tokens, and is deleted. What each call took is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd import AsyncClient, Prefix
from numpy.typing import NDArray

from bench.cases.trace import Request
from bench.driver.processes import Processes

KINDS: Final = ("create", "prefill", "commit", "decode", "delete")
KV_HEADS: Final = 2
QO_HEADS: Final = 8
HEAD_DIM: Final = 64
PAGE: Final = 16
"""Tokens of a page, and what a block of the trace becomes."""
LAYERS: Final = 1
DECODES: Final = 4
"""Tokens that a request decodes, whatever the trace says."""
POOL: Final = {
    "num-layers": LAYERS,
    "num-kv-heads": KV_HEADS,
    "head-dim": HEAD_DIM,
    "page-size": PAGE,
    "dtype": "fp32",
}


@dataclass(frozen=True, slots=True)
class Called:
    """One call: its kind, tokens that are new in it and pairs of query and key, and seconds by the
    clock and of each process's processor."""

    kind: str
    new: int
    pairs: int
    wall_s: float
    cpu_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Played:
    """What came of a replay: seconds of every request and in all, tokens asked for and cached."""

    request_s: list[float] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    wall_s: float = 0.0
    tokens: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached / max(1, self.tokens)

    def summary(self) -> dict[str, float]:
        return summary(self.request_s, self.wall_s, self.hit_rate, len(self.calls))


def summary(
    request_s: Sequence[float], wall_s: float, hit_rate: float, calls: int
) -> dict[str, float]:
    """The figures that a simulation is held to."""
    p50, p99 = np.percentile(request_s, (50, 99)).tolist()
    return {
        "requests_per_s": round(len(request_s) / wall_s, 2),
        "calls_per_s": round(calls / wall_s, 1),
        "p50_ms": round(1e3 * p50, 2),
        "p99_ms": round(1e3 * p99, 2),
        "hit_rate": round(hit_rate, 4),
    }


def token_ids(blocks: Sequence[int]) -> NDArray[np.uint32]:
    """Ids of a prompt, a page for each block, which only these blocks have."""
    numbers = np.array(blocks, np.int64)[:, np.newaxis] * PAGE + np.arange(PAGE)
    return (numbers % (1 << 32)).astype(np.uint32).ravel()


class Player:
    """Plays requests on one service by one client."""

    def __init__(self, client: AsyncClient, played: Played, processes: Processes | None) -> None:
        self._client = client
        self._played = played
        self._processes = processes
        rows = np.random.default_rng(0).standard_normal((2**14, QO_HEADS, HEAD_DIM))
        self._q: NDArray[Any] = rows.astype(np.float32)
        self._kv = np.ascontiguousarray(self._q[:, :KV_HEADS])

    async def play(self, request: Request) -> None:
        """One request, from its beginning to its deletion. The service names the sequence."""
        ids = token_ids(request.blocks)
        begun = time.perf_counter()
        prefix = Prefix(ids)
        made = await self.call(
            "create", ids.size, 0, lambda: self._client.create_sequence(prefix=prefix)
        )
        name, cached = made.id, made.cached_len
        self._played.tokens += ids.size
        self._played.cached += cached
        await self.prefill(name, cached, ids.size)
        await self.call("commit", ids.size - cached, 0, lambda: self._client.commit(name, prefix))
        for step in range(DECODES):
            await self.decode(name, ids.size + step)
        await self.call("delete", ids.size, 0, lambda: self._client.delete_sequence(name))
        self._played.request_s.append(time.perf_counter() - begun)

    async def prefill(self, name: str, cached: int, length: int) -> None:
        """The last token at least is computed, whatever is cached; none is appended for it."""
        new = length - cached
        rows = max(1, new)
        pairs = rows * length - rows * (rows - 1) // 2
        kv = {"k": self._kv[:new], "v": self._kv[:new]} if new else {}
        for layer in range(LAYERS):
            await self.call(
                "prefill",
                new,
                pairs,
                lambda layer=layer: self._client.prefill(  # type: ignore[misc]
                    layer, [name], self._q[:rows], [0, rows], causal=True, **kv
                ),
            )

    async def decode(self, name: str, length: int) -> None:
        q, kv = self._q[:1], self._kv[:1]
        for layer in range(LAYERS):
            await self.call(
                "decode",
                1,
                length + 1,
                lambda layer=layer: self._client.decode(layer, [name], q, k=kv, v=kv),  # type: ignore[misc]
            )

    async def call(self, kind: str, new: int, pairs: int, send: Callable[[], Any]) -> Any:
        before = self._processes.read() if self._processes else ()
        begun = time.perf_counter()
        answer = await send()
        wall_s = time.perf_counter() - begun
        after = self._processes.read() if self._processes else ()
        cpu_s = tuple(b - a for a, b in zip(before, after, strict=True))
        self._played.calls.append(Called(kind, new, pairs, wall_s, cpu_s))
        return answer


async def replay(
    shares: Sequence[tuple[str, Sequence[Request]]],
    workers: int,
    processes: Processes | None = None,
) -> Played:
    """Replay each share of a trace on the service at its URL, `workers` requests of it at a time.

    With `processes` what each call cost them is measured, which wants one worker.
    """
    played = Played()
    clients = [AsyncClient(url, timeout=120.0) for url, _ in shares]

    async def work(player: Player, left: list[Request]) -> None:
        while left:
            await player.play(left.pop())

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for client, (_, requests) in zip(clients, shares, strict=True):
            left = list(requests)[::-1]
            player = Player(client, played, processes)
            for _ in range(workers):
                group.create_task(work(player, left))
    played.wall_s = time.perf_counter() - begun
    for client in clients:
        await client.aclose()
    return played
