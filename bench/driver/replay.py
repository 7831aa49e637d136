"""A trace replayed on running services, with a record of every call.

Every request starts from the prefix cache, is prefilled and committed, decodes a few tokens, and is
deleted.
"""

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
"""Tokens of a page. A block of the trace becomes a page."""
LAYERS: Final = 1
DECODES: Final = 4
"""Tokens that every request decodes."""
POOL: Final = {
    "num-layers": LAYERS,
    "num-kv-heads": KV_HEADS,
    "head-dim": HEAD_DIM,
    "page-size": PAGE,
    "dtype": "fp32",
}


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call: its kind, new tokens, pairs of query and key, wall time, and CPU time by process."""

    kind: str
    new: int
    pairs: int
    wall_s: float
    cpu_s: tuple[float, ...] = ()


@dataclass(slots=True)
class ReplayResult:
    """Seconds of every request and in all, the calls, tokens of prompts, and cached tokens."""

    request_s: list[float] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
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
    """The figures that a simulation is compared with."""
    p50, p99 = np.percentile(request_s, (50, 99)).tolist()
    return {
        "requests_per_s": round(len(request_s) / wall_s, 2),
        "calls_per_s": round(calls / wall_s, 1),
        "p50_ms": round(1e3 * p50, 2),
        "p99_ms": round(1e3 * p99, 2),
        "hit_rate": round(hit_rate, 4),
    }


def token_ids(blocks: Sequence[int]) -> NDArray[np.uint32]:
    """Token ids of a prompt, a page for each block, unique to these blocks."""
    numbers = np.array(blocks, np.int64)[:, np.newaxis] * PAGE + np.arange(PAGE)
    return (numbers % (1 << 32)).astype(np.uint32).ravel()


class Rereplayer:
    """Replays requests on one service by one client."""

    def __init__(
        self, client: AsyncClient, result: ReplayResult, processes: Processes | None
    ) -> None:
        self._client = client
        self._result = result
        self._processes = processes
        rows = np.random.default_rng(0).standard_normal((2**14, QO_HEADS, HEAD_DIM))
        self._q: NDArray[Any] = rows.astype(np.float32)
        self._kv = np.ascontiguousarray(self._q[:, :KV_HEADS])

    async def replay(self, request: Request) -> None:
        """One request, from create to delete. The service names the sequence."""
        ids = token_ids(request.blocks)
        begun = time.perf_counter()
        prefix = Prefix(ids)
        made = await self.call(
            "create", ids.size, 0, lambda: self._client.create_sequence(prefix=prefix)
        )
        name, cached = made.id, made.cached_len
        self._result.tokens += ids.size
        self._result.cached += cached
        await self.prefill(name, cached, ids.size)
        await self.call("commit", ids.size - cached, 0, lambda: self._client.commit(name, prefix))
        for step in range(DECODES):
            await self.decode(name, ids.size + step)
        await self.call("delete", ids.size, 0, lambda: self._client.delete_sequence(name))
        self._result.request_s.append(time.perf_counter() - begun)

    async def prefill(self, name: str, cached: int, length: int) -> None:
        """Computes at least the last token, and appends those that are not cached."""
        new = length - cached
        rows = max(1, new)
        pairs = rows * length - rows * (rows - 1) // 2
        kv: dict[str, Any] = {"k": self._kv[:new], "v": self._kv[:new]} if new else {}
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
        self._result.calls.append(CallRecord(kind, new, pairs, wall_s, cpu_s))
        return answer


async def replay(
    shares: Sequence[tuple[str, Sequence[Request]]],
    workers: int,
    processes: Processes | None = None,
) -> ReplayResult:
    """Replay each share of a trace on the service at its URL, `workers` requests at a time.

    `processes`: also measure their CPU time of each call, which requires one worker.
    """
    result = ReplayResult()
    clients = [AsyncClient(url, timeout=120.0) for url, _ in shares]

    async def work(replayer: Rereplayer, left: list[Request]) -> None:
        while left:
            await replayer.replay(left.pop())

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for client, (_, requests) in zip(clients, shares, strict=True):
            left = list(requests)[::-1]
            replayer = Rereplayer(client, result, processes)
            for _ in range(workers):
                group.create_task(work(replayer, left))
    result.wall_s = time.perf_counter() - begun
    for client in clients:
        await client.aclose()
    return result
