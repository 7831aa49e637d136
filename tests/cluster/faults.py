"""A cluster under load whose engines are killed at random: no wrong number, no hang, no page lost.

python -m tests.cluster.faults --seconds 600 --engines 3

Clients remember their rows and check every reply: gathered rows bit by bit, attention in float64.
Errors outside `ALLOWED` are faults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from service.cluster.routing.router import Router
from service.doors.kit.link import GRACE_S
from tests.cluster.harness import (
    ATOL,
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    PAGES,
    SETTINGS,
    Answer,
    Cluster,
    rows,
)
from tests.cluster.local_engines import LocalEngines, local_engines
from tests.oracle import attend, visible

ALLOWED: Final = frozenset({"lost_sequence", "not_ready", "out_of_pages", "deadline_exceeded"})
"""Errors that a client must handle while engines die."""
MAX_INFLIGHT_S: Final = SETTINGS.server.deadline_s + GRACE_S + 2.0
MOST_SEQUENCES: Final = 8
MOST_TOKENS: Final = 40
MOST_ROWS: Final = 3
REST_S: Final = (0.5, 4.0)
"""Between two faults, beside the time that an engine takes to come back."""
COME_BACK_S: Final = 120.0


@dataclass(slots=True)
class Stored:
    """The expected rows of a sequence: k and v of each layer."""

    k: list[Any]
    v: list[Any]

    @classmethod
    def empty(cls) -> Stored:
        nothing = np.empty((0, HEADS, DIM), FLOAT)
        return cls([nothing] * LAYERS, [nothing] * LAYERS)

    def fork(self) -> Stored:
        return Stored(list(self.k), list(self.v))


@dataclass(slots=True)
class Client:
    """A caller with sequences of its own."""

    cluster: Cluster
    number: int
    seed: int
    outcomes: Counter[str]
    stored: dict[str, Stored] = field(default_factory=dict)
    made: int = 0
    slowest: float = 0.0
    random: random.Random = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rng = np.random.default_rng(self.seed)

    async def live(self, ends: float) -> None:
        while time.monotonic() < ends:
            does = self.random.choice(
                (self.create, self.append, self.append, self.decode, self.decode, self.gather)
            )
            if self.random.random() < 0.1:
                does = self.delete
            await does()

    async def ask(self, name: str, fields: dict[str, Any], **arrays: Any) -> Answer | None:
        """The reply; None for an allowed error."""
        started = time.monotonic()
        async with asyncio.timeout(MAX_INFLIGHT_S):
            answer = await self.cluster.call(name, fields, **arrays)
        self.slowest = max(self.slowest, time.monotonic() - started)
        if answer.status < 300:
            self.outcomes["ok"] += 1
            return answer
        code = answer.fields["code"]
        self.outcomes[code] += 1
        assert code in ALLOWED, f"{name} {fields}: {answer}"
        if code == "lost_sequence":
            lost = answer.fields["sequences"]
            assert lost and set(lost) <= self.stored.keys(), f"{name}: {lost} was not in the call"
            for one in lost:
                del self.stored[one]
        return answer if "done" in answer.fields else None

    def some(self, count: int = 4) -> list[str]:
        return self.random.sample(sorted(self.stored), min(count, len(self.stored)))

    async def create(self) -> None:
        if len(self.stored) >= MOST_SEQUENCES:
            return
        self.made += 1
        chosen = f"client-{self.number}-{self.made}" if self.random.random() < 0.5 else None
        new: dict[str, Any] = {} if chosen is None else {"id": chosen}
        whole = [name for name in self.some() if even(self.stored[name])]
        parent = whole[0] if whole and self.random.random() < 0.5 else None
        if parent is not None:
            new["parent"] = parent
        reply = await self.ask("create_sequences", {"sequences": [new]})
        if reply is not None:
            (view,) = reply.fields["sequences"]
            origin = self.stored.get(parent or "")
            self.stored[view["id"]] = Stored.empty() if origin is None else origin.fork()

    async def append(self) -> None:
        ids, layer = self.some(), self.random.randrange(LAYERS)
        ids = [name for name in ids if len(self.stored[name].k[layer]) < MOST_TOKENS]
        if not ids:
            return
        counts = [self.random.randrange(MOST_ROWS + 1) for _ in ids]
        sums = [0, *np.cumsum(counts).tolist()]
        k, v = rows(self.rng, sums[-1]), rows(self.rng, sums[-1])
        before = [len(self.stored[name].k[layer]) for name in ids]
        fields = {"layer": layer, "sequences": ids, "append_indptr": sums, "offsets": before}
        reply = await self.ask("append", fields, k=k, v=v)
        done = await self.done(reply, ids, layer, before, counts)
        for at, name in enumerate(ids):
            if name in done and name in self.stored:
                one, part = self.stored[name], slice(sums[at], sums[at + 1])
                one.k[layer] = np.concatenate([one.k[layer], k[part]])
                one.v[layer] = np.concatenate([one.v[layer], v[part]])

    async def done(
        self,
        reply: Answer | None,
        ids: Sequence[str],
        layer: int,
        before: Sequence[int],
        counts: Sequence[int],
    ) -> set[str]:
        """The sequences that have grown; without a reply they are asked for their lengths."""
        if reply is not None:
            return set(ids if reply.status < 300 else reply.fields["done"])
        grown = set()
        for name, length, count in zip(ids, before, counts, strict=True):
            while name in self.stored:
                view = await self.ask("get_sequence", {"id": name})
                if view is None:
                    await asyncio.sleep(0.1)
                    continue
                found = view.fields["lengths"][layer]
                assert found in (length, length + count), f"{name} has {found} tokens"
                if found > length:
                    grown.add(name)
                break
        return grown

    async def decode(self) -> None:
        ids, layer = self.some(), self.random.randrange(LAYERS)
        if not ids:
            return
        kept = {name: self.stored[name] for name in ids}
        q = rows(self.rng, len(ids), 2 * HEADS)
        reply = await self.ask("decode", {"layer": layer, "sequences": ids}, q=q)
        if reply is None:
            return
        for at, name in enumerate(ids):
            k, v = kept[name].k[layer], kept[name].v[layer]
            o, lse = attend(q[at : at + 1], k, v, visible(1, len(k)), sm_scale=DIM**-0.5)
            np.testing.assert_allclose(reply.arrays["o"][at], o[0], atol=ATOL)
            np.testing.assert_allclose(reply.arrays["lse"][at], lse[0], atol=ATOL)

    async def gather(self) -> None:
        ids, layer = self.some(), self.random.randrange(LAYERS)
        if not ids:
            return
        expected = {part: [getattr(self.stored[n], part)[layer] for n in ids] for part in "kv"}
        reply = await self.ask("gather", {"layer": layer, "sequences": ids})
        if reply is not None:
            for part in "kv":
                np.testing.assert_array_equal(reply.arrays[part], np.concatenate(expected[part]))

    async def delete(self) -> None:
        for name in self.some(1):
            if await self.ask("delete_sequence", {"id": name}) is not None:
                del self.stored[name]


def even(one: Stored) -> bool:
    """Whether all layers have the same tokens, so that all of it can be forked."""
    return len({len(k) for k in one.k}) == 1


async def make_faults(cluster: Cluster, ends: float, rng: random.Random, kinds: Any) -> None:
    """Kills or stops engines, one after another, and waits until each is back."""
    engines, members = cluster.engines, cluster.router.members
    while time.monotonic() < ends:
        await asyncio.sleep(rng.uniform(*REST_S))
        name = rng.choice(sorted(engines.processes))
        process = engines.processes[name]
        if rng.random() < 0.2 and time.monotonic() + 20 < ends:
            kinds["hung"] += 1
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.1, 15.0))
            process.send_signal(signal.SIGCONT)
            continue
        kinds["killed"] += 1
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        engines.start(name)
        async with asyncio.timeout(COME_BACK_S):
            while (member := members.by_name[name]).engine is None or len(members.engines) < len(
                engines.processes
            ):
                await asyncio.sleep(0.05)
        assert member.engine is not None


async def play(engines: LocalEngines, seconds: float, seed: int, clients: int = 6) -> Counter[str]:
    """Load and faults for some seconds; returns counts. AssertionError where anything is wrong."""
    router = Router(SETTINGS.server)
    cluster = Cluster(router, engines)
    outcomes: Counter[str] = Counter()
    count = len(engines.processes)
    try:
        await router.connect(str(engines.roster), "faults", engines.secret)
        await cluster.until(lambda: len(router.members.engines) == count, "all engines")
        ends = time.monotonic() + seconds
        callers = [Client(cluster, n, seed + n, outcomes) for n in range(clients)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(make_faults(cluster, ends, random.Random(seed), outcomes))
            for caller in callers:
                tasks.create_task(caller.live(ends))
        await cluster.until(lambda: len(router.members.engines) == count, "all engines again")
        await cluster.ok("delete_sequences", {"prefix": ""})
        await cluster.ok("clear")
        pool = await cluster.fields("pool")
        assert pool["free"] == pool["total"] == PAGES * count, pool
        assert pool["integrity"] == "ok", pool
        outcomes["slowest ms"] = int(1e3 * max(caller.slowest for caller in callers))
    finally:
        router.close()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tcp", action="store_true", help="as if they were on other hosts")
    given = parser.parse_args()
    with local_engines(given.engines, SETTINGS, over_tcp=given.tcp) as engines:
        print(dict(asyncio.run(play(engines, given.seconds, given.seed))))


if __name__ == "__main__":
    main()
