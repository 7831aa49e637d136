"""A trace replayed on running services.

Every request starts from the prefix cache, is prefilled and committed, decodes a few tokens, and is
deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd import AsyncClient, Prefix
from numpy.typing import NDArray

from bench.cases.trace import TraceRequest, token_ids

KV_HEADS: Final = 2
QO_HEADS: Final = 8
HEAD_DIM: Final = 64
PAGE: Final = 16
"""Tokens of a page. A block of the trace becomes a page."""
DECODES: Final = 4
"""Tokens that every request decodes."""
HEADS: Final = {"num-kv-heads": KV_HEADS, "head-dim": HEAD_DIM}
POOL: Final = HEADS | {"num-layers": 1, "page-size": PAGE, "dtype": "fp32"}


@dataclass(slots=True)
class ReplayResult:
    """Seconds of every request and in all; tokens of prompts, and cached tokens."""

    request_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    tokens: int = 0
    cached: int = 0

    def summary(self) -> dict[str, float]:
        """Throughput, latency and token hit rate."""
        p50, p99 = np.percentile(self.request_s, (50, 99)).tolist()
        return {
            "requests_per_s": round(len(self.request_s) / self.wall_s, 2),
            "p50_ms": round(1e3 * p50, 2),
            "p99_ms": round(1e3 * p99, 2),
            "hit_rate": round(self.cached / max(1, self.tokens), 4),
        }


class Replayer:
    """Replays requests on one service by one client."""

    def __init__(self, client: AsyncClient, result: ReplayResult) -> None:
        self._client = client
        self._result = result
        rows = np.random.default_rng(0).standard_normal((2**14, QO_HEADS, HEAD_DIM))
        self._q: NDArray[Any] = rows.astype(np.float32)
        self._kv = np.ascontiguousarray(self._q[:, :KV_HEADS])

    async def replay(self, request: TraceRequest) -> None:
        """One request, from create to delete. The service names the sequence."""
        client, prefix = self._client, Prefix(token_ids(np.array(request.blocks), PAGE))
        length = len(request.blocks) * PAGE
        begun = time.perf_counter()
        made = await client.create_sequence(prefix=prefix)
        new = length - made.cached_len
        rows = max(1, new)  # the last token's state is computed in any case
        kv: dict[str, Any] = {"k": self._kv[:new], "v": self._kv[:new]} if new else {}
        await client.prefill(0, [made.id], self._q[:rows], [0, rows], causal=True, **kv)
        await client.commit(made.id, prefix)
        for _ in range(DECODES):
            await client.decode(0, [made.id], self._q[:1], k=self._kv[:1], v=self._kv[:1])
        await client.delete_sequence(made.id)
        self._result.request_s.append(time.perf_counter() - begun)
        self._result.tokens += length
        self._result.cached += made.cached_len


async def replay(
    shares: Sequence[tuple[str, Sequence[TraceRequest]]], workers: int
) -> ReplayResult:
    """Replay each share of a trace on the service at its URL, `workers` requests at a time."""
    result = ReplayResult()
    clients = [AsyncClient(url, timeout=120.0) for url, _ in shares]

    async def work(replayer: Replayer, left: list[TraceRequest]) -> None:
        while left:
            await replayer.replay(left.pop())

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for client, (_, requests) in zip(clients, shares, strict=True):
            left = list(requests)[::-1]
            replayer = Replayer(client, result)
            for _ in range(workers):
                group.create_task(work(replayer, left))
    result.wall_s = time.perf_counter() - begun
    for client in clients:
        await client.aclose()
    return result
