"""A cluster whose engines are drained and stopped, and whose router is killed: no engine dies, so
no sequence may be lost, duplicated or reported unknown.

python -m tests.cluster.stress --seconds 600 --engines 3

Callers append to sequences of their own in batches. The value of each row is that of its place, so
a row that is missing, stored twice or on the wrong sequence shows in the rows that are read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from config.sections import Settings
from config.settings import load_settings
from service.addresses import bind_addresses
from service.cluster.membership.processes import Processes, router_children
from tests.cluster.local_engines import LocalEngines, local_engines

PAGES: Final = 8192
PAGE: Final = 4
MOST_TOKENS: Final = 120
MOST_SEQUENCES: Final = 10
STEP: Final = 1000
"""Between the first values of two sequences; fp32 has all integers that come up."""
AGAIN: Final = frozenset({"not_ready", "overloaded", "deadline_exceeded"})
"""Errors that a client must retry while no engine dies."""
UNCERTAIN: Final = frozenset({"deadline_exceeded", "broken"})
"""It may have been done, or be done yet."""
SETTLED_S: Final = 60.0
"""After which everything must be answered again."""


def settings(*given: str) -> Settings:
    return load_settings(
        [
            *("--backend.kind", "cpu", "--pool.num-layers", "1", "--pool.num-kv-heads", "1"),
            *("--pool.head-dim", "4", "--pool.page-size", str(PAGE)),
            *("--pool.num-pages", str(PAGES), "--pool.dtype", "fp32"),
            *("--log.level", "error", "--server.port", "0", "--server.http-workers", "2"),
            *given,
        ]
    )


@dataclass
class Written:
    """A sequence that has `length` tokens for certain, and perhaps `more`."""

    id: str
    first: int
    length: int = 0
    more: int = 0
    is_made: bool = False

    def rows(self, count: int) -> list[float]:
        places = range(self.length, self.length + count)
        return [float(self.first + place) for place in places for _ in range(4)]


@dataclass
class Caller:
    """One with sequences of its own, which makes one call after another."""

    client: httpx.AsyncClient
    number: int
    num_engines: int
    outcomes: Counter[str]
    written: list[Written] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.number)

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[str, dict[str, Any]]:
        """The code of an answer, `ok` or a problem's, and its document."""
        try:
            headers = {"x-attnd-deadline-ms": "4000"}
            got = await self.client.request(method, path, json=body, headers=headers)
        except httpx.TransportError:
            self.outcomes["broken"] += 1
            return "broken", {}
        reply = got.json() if got.content else {}
        code = "ok" if got.status_code < 300 else reply["code"]
        self.outcomes[code] += 1
        return code, reply

    async def live(self, ends: float) -> None:
        while time.monotonic() < ends:
            if len(self.written) < MOST_SEQUENCES and self.random.random() < 0.2:
                await self.create()
            elif self.written:
                some = self.random.sample(self.written, min(len(self.written), 4))
                work = self.random.choice([self.append, self.append, self.read, self.look])
                await work([one for one in some if one.is_made])
            await asyncio.sleep(self.random.uniform(0.0, 0.01))

    async def create(self) -> None:
        at = self.number * MOST_SEQUENCES + len(self.written)
        one = Written(f"s{at}", at * STEP)
        self.written.append(one)
        while not one.is_made:
            new = {"sequences": [{"id": one.id}]}
            code, reply = await self.ask("POST", "/v1/sequences", new)
            tried = self.outcomes[f"tried {one.id}"]
            assert code in AGAIN | {"ok", "broken"} or (code == "sequence_exists" and tried), reply
            one.is_made = code in ("ok", "sequence_exists")
            self.outcomes[f"tried {one.id}"] += code in UNCERTAIN
            if not one.is_made:
                await asyncio.sleep(0.05)
        del self.outcomes[f"tried {one.id}"]

    async def append(self, some: Sequence[Written]) -> None:
        """Appends a batch, and repeats the rest until all is done."""
        left = {one.id: self.random.randint(1, 5) for one in some if one.length < MOST_TOKENS}
        by_id = {one.id: one for one in some}
        while left:
            body = self.batch([by_id[name] for name in left], left)
            code, reply = await self.ask("POST", "/v1/append", body)
            done = list(left) if code == "ok" else reply.get("done", [])
            assert set(done) <= set(left), (done, left)
            for name in done:
                one = by_id[name]
                one.length += left.pop(name)
                one.more = 0  # an append that came late would not find its offset any more
            if code == "ok":
                continue
            unsure = [by_id[name] for name in left]
            if code in UNCERTAIN:
                for one in unsure:
                    one.more = max(one.more, left[one.id])
            elif code == "length_mismatch":
                assert any(one.more for one in unsure), (reply, unsure)
            else:
                assert code in AGAIN, reply
            for one in unsure:
                if one.more and await self.has_come(one):
                    left.pop(one.id)
            await asyncio.sleep(0.01)

    async def has_come(self, one: Written) -> bool:
        """Whether an uncertain append has taken effect."""
        before = one.length
        await self.look([one])
        return one.length > before

    def batch(self, some: Sequence[Written], counts: dict[str, int]) -> dict[str, Any]:
        indptr = [0]
        rows: list[float] = []
        for one in some:
            indptr.append(indptr[-1] + counts[one.id])
            rows += one.rows(counts[one.id])
        k = {"dtype": "F32", "shape": [indptr[-1], 1, 4], "data": rows}
        return {
            "layer": 0,
            "sequences": [one.id for one in some],
            "offsets": [one.length for one in some],
            "append_indptr": indptr,
            "tensors": {"k": k, "v": k},
        }

    async def look(self, some: Sequence[Written]) -> None:
        for one in some:
            code, reply = await self.ask("GET", f"/v1/sequences/{one.id}")
            assert code in AGAIN | {"ok", "broken"}, reply
            if code == "ok":
                self.is_at(one, reply["length"])

    def is_at(self, one: Written, length: int) -> None:
        assert one.length <= length <= one.length + one.more, (length, one)
        if length > one.length:
            one.length, one.more = length, 0

    async def list_sequences(self) -> list[str]:
        """All ids. An engine that is slow to respond for a moment makes the list a 503: retry."""
        while True:
            code, reply = await self.ask("GET", "/v1/sequences?limit=1000")
            if code == "ok":
                return [one["id"] for one in reply["sequences"]]
            assert code in AGAIN | {"broken"}, reply
            await asyncio.sleep(0.1)

    async def read(self, some: Sequence[Written]) -> bool:
        """All rows of a batch; whether they were answered."""
        if not some:
            return True
        body = {"layer": 0, "sequences": [one.id for one in some], "dtype": "fp32"}
        code, reply = await self.ask("POST", "/v1/gather", body)
        assert code in AGAIN | {"ok", "broken"}, reply
        if code != "ok":
            return False
        data = reply["tensors"]["k"]["data"][::4]
        assert reply["tensors"]["v"]["data"][::4] == data
        for one, (begin, end) in zip(some, pairwise(reply["kv_indptr"]), strict=True):
            assert data[begin:end] == [float(one.first + at) for at in range(end - begin)], one
            self.is_at(one, end - begin)
        return True


@dataclass
class Service:
    """A router as a process over engines of this host."""

    engines: LocalEngines
    router: Processes
    url: str


@contextmanager
def served(count: int, *, over_tcp: bool = False) -> Iterator[Service]:
    given = settings()
    with local_engines(count, given, over_tcp=over_tcp) as engines:
        addresses = bind_addresses(given.server, num_engines=0)
        addresses.roster.unlink(missing_ok=True)
        addresses.roster.symlink_to(engines.roster)
        children = router_children(given, addresses)
        router = Processes(given, children, str(addresses.roster), addresses.url, engines.secret)
        try:
            yield Service(engines, router, addresses.url)
        finally:
            router.end(5.0)
            addresses.roster.unlink(missing_ok=True)
            addresses.close()


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=service.url, timeout=30.0, limits=limits) as client:
        yield client


async def until_ready(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(SETTLED_S):
        while True:
            try:
                ready = await client.get("/health/ready")
                reply = (await client.get("/v1/engines")).json()
                if ready.status_code == 200 and len(reply.get("engines", ())) == count:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def empty(caller: Caller, name: str, *, stop: bool = False) -> None:
    body = {"stop": True} if stop else {}
    await caller.ask("POST", f"/v1/engines/{name}/drain", body)


async def drains(caller: Caller, names: Sequence[str], ends: float) -> None:
    """One engine after another is emptied, and takes new sequences again."""
    while time.monotonic() < ends:
        name = caller.random.choice(names)
        await empty(caller, name)
        await asyncio.sleep(caller.random.uniform(0.2, 1.5))
        for _ in range(3):  # the router may have been killed
            await empty(caller, name, stop=True)
        caller.outcomes["drains"] += 1


async def stalls(service: Service, seed: int, ends: float, longest_s: float, count: Any) -> None:
    """Stops engines for a while."""
    rng = random.Random(seed)
    while time.monotonic() < ends:
        await asyncio.sleep(rng.uniform(1.0, 5.0))
        process = service.engines.processes[rng.choice(sorted(service.engines.processes))]
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.05, longest_s))
        finally:
            process.send_signal(signal.SIGCONT)
        count["stalls"] += 1


async def kills(service: Service, seed: int, ends: float, count: Counter[str]) -> None:
    """The router is killed and started again."""
    rng = random.Random(seed)
    while time.monotonic() < ends:
        await asyncio.sleep(rng.uniform(0.5, 2.0))
        process = service.router.first
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        service.router.check()
        count["router killed"] += 1


async def play(
    service: Service, seconds: float, seed: int, longest_stall_s: float, num_callers: int = 4
) -> Counter[str]:
    """Plays for some seconds; returns counts. AssertionError where anything is wrong."""
    outcomes: Counter[str] = Counter()
    names = sorted(service.engines.processes)
    async with client_of(service) as client:
        await until_ready(client, len(names))
        callers = [Caller(client, n, len(names), outcomes) for n in range(num_callers)]
        operator, ends = Caller(client, seed, len(names), outcomes), time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for caller in callers:
                tasks.create_task(caller.live(ends))
            tasks.create_task(drains(operator, names, ends))
            tasks.create_task(stalls(service, seed, ends, longest_stall_s, outcomes))
            tasks.create_task(kills(service, seed, ends, outcomes))
        await until_ready(client, len(names))
        for name in names:
            await empty(operator, name, stop=True)
        every = [(caller, one) for caller in callers for one in caller.written]
        async with asyncio.timeout(SETTLED_S):
            for caller, one in every:
                while not await caller.read([one]):
                    await asyncio.sleep(0.1)
            listed = await operator.list_sequences()
        assert listed == sorted(one.id for _, one in every)
        outcomes["rows"] = sum(one.length for _, one in every)
        await client.post("/v1/sequences/delete", json={"prefix": ""})
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--stall", type=float, default=15.0, help="longest stall of an engine, s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tcp", action="store_true", help="as if they were on other hosts")
    given = parser.parse_args()
    with served(given.engines, over_tcp=given.tcp) as service:
        played = play(service, given.seconds, given.seed, given.stall)
        print(dict(asyncio.run(played)))


if __name__ == "__main__":
    main()
