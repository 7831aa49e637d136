"""Calls to a router in the test's process, with numpy in and out.

An async test with the argument `cluster: Cluster` gets a router of its own over two engines, or
over three by its mark `THREE`; `run` checks afterwards that no page has leaked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from attnd.wire.images import PROBLEM, RESPONSE

from config.settings import load_settings
from service.cluster.placement.prefixes import Prefixes
from service.cluster.routing.router import Router
from service.doors.kit.problems import ProblemText, document_of
from service.errors import AttndError
from service.image.json_text import dump_json
from service.image.reading import REQUEST, place, read_layout, split
from service.image.writing import image
from service.operations.table import BY_NAME
from service.tenants import OPEN, Tenant
from tests.cluster.local_engines import LocalEngines

BACKEND: Final = os.environ.get("TEST_BACKEND", "cpu")
"""`TEST_BACKEND=cuda pytest -n 2 --dist loadfile tests/cluster` runs all of this on engines that
share a GPU: half a GiB of it each, three a process."""
ON_GPU: Final = BACKEND == "cuda"
LAYERS: Final = 2
HEADS: Final = 2
DIM: Final = 64 if ON_GPU else 16
FLOAT: Final = np.dtype(np.float16 if ON_GPU else np.float32)
ATOL: Final = 2e-3 if ON_GPU else 2e-5
"""By which `o` and `lse` of values of about 1 may be off."""
PAGE: Final = 4
PAGES: Final = 128
SETTINGS: Final = load_settings(
    [
        *("--backend.kind", BACKEND),
        *("--pool.num-layers", str(LAYERS)),
        *("--pool.num-kv-heads", str(HEADS)),
        *("--pool.head-dim", str(DIM)),
        *("--pool.page-size", str(PAGE)),
        *("--pool.num-pages", str(PAGES)),
        *("--pool.dtype", "fp16" if ON_GPU else "fp32"),
        *("--log.level", "warning"),
        *("--server.deadline-s", "20"),
    ]
)
WAIT_S: Final = 180.0
THREE: Final = pytest.mark.parametrize("cluster", ["three_engines"], indirect=True)
"""Three engines, shared by tests that leave them as they were."""


@dataclass(slots=True)
class Answer:
    """A reply: its `status`, its fields or the problem document, its tensors and stages."""

    status: int
    fields: dict[str, Any]
    arrays: dict[str, Any]
    stages: tuple[float, ...] = ()


@dataclass(slots=True)
class Cluster:
    """A router and its engines."""

    router: Router
    engines: LocalEngines

    async def call(
        self, name: str, fields: Any, tenant: Tenant = OPEN, deadline_s: float = 0.0, **arrays: Any
    ) -> Answer:
        router = self.router
        slot, length = router.arena.lay(image(REQUEST, dump_json(fields), arrays))
        us = int(deadline_s * 1e6)
        try:
            answered, place_of = await router.call(
                BY_NAME[name], slot, length, 2**26, us, b"", tenant
            )
        except (AttndError, ProblemText) as error:
            document = document_of(error, b"")
            return Answer(document["status"], document, {})
        finally:
            router.arena.give_back(slot)
        whole = answered.image
        header, start = split(whole) if len(whole) else (b"{}", 0)
        key = PROBLEM if answered.status >= 400 else RESPONSE
        layout = read_layout(header, len(whole) - start, key)
        copied = {one: np.array(array) for one, array in place(whole, start, layout).items()}
        router.arena.give_back(place_of)
        return Answer(answered.status, layout.fields, copied, answered.stages)

    async def ok(self, name: str, fields: Any = None, **arrays: Any) -> Answer:
        """The reply to a call that must succeed."""
        answer = await self.call(name, fields or {}, **arrays)
        assert answer.status < 300, answer
        return answer

    async def fields(self, name: str, fields: Any = None, **arrays: Any) -> Any:
        """The fields of the reply to a call that must succeed."""
        return (await self.ok(name, fields, **arrays)).fields

    async def error(self, name: str, fields: Any, **arrays: Any) -> tuple[int, str, Answer]:
        """The status, the code and all of the error reply to a call."""
        answer = await self.call(name, fields, **arrays)
        return answer.status, answer.fields["code"], answer

    async def ids(self) -> list[str]:
        """All sequences."""
        listed = await self.fields("list_sequences", {"limit": 1000})
        return [one["id"] for one in listed["sequences"]]

    async def engine(self, name: str) -> Any:
        """An engine's view of itself; None where it is not there."""
        views = (await self.fields("engines"))["engines"]
        return next((one for one in views if one["name"] == name), None)

    def only_on(self, *names: str) -> None:
        """Places new sequences on these engines only; without names on all."""
        for engine in self.router.members.engines:
            engine.is_leaving = bool(names) and engine.name not in names

    async def drain(self, name: str) -> None:
        await self.ok("drain_engine", {"name": name})

    async def end_drain(self, name: str) -> None:
        """The engine accepts new sequences again."""
        await self.ok("drain_engine", {"name": name, "stop": True})

    async def create(self, count: int, **fields: Any) -> list[str]:
        made = await self.fields("create_sequences", {"sequences": [dict(fields)] * count})
        return [one["id"] for one in made["sequences"]]

    async def create_apart(self) -> list[str]:
        """A sequence on each engine, however busy those are."""
        made = []
        for engine in self.router.members.engines:
            self.only_on(engine.name)
            made += await self.create(1)
        self.only_on()
        return made

    def home(self, name: str) -> str:
        """The name of the engine that a sequence is on."""
        return self.router.members.by_tag[self.router.ids.tag(("default", name))].name

    async def until(self, ready: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(0.02)
        assert ready(), what

    async def free_pages(self) -> int:
        return int((await self.fields("pool"))["free"])


def run(engines: LocalEngines, test: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    """Run a test against a router of its own; in the end no page may be left taken."""

    async def main() -> None:
        router = Router(SETTINGS.server)
        cluster = Cluster(router, engines)
        count = len(engines.engines)

        def all_there() -> bool:
            ended = [name for name, one in engines.processes.items() if one.poll() is not None]
            assert not ended, f"could not start, or has died: {ended}"
            members = router.members
            known = [one.is_known for one in members.by_name.values()]
            return len(members.engines) == count and all(known)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(router.connect(str(engines.roster), "test", engines.secret))
                await cluster.until(all_there, "all engines")
            await test(cluster)
            await cluster.ok("delete_sequences", {"prefix": ""})
            await cluster.ok("clear")
            pool = await cluster.fields("pool")
            assert pool["free"] == pool["total"] == PAGES * count, pool
            assert pool["integrity"] == "ok"
        finally:
            router.close()

    asyncio.run(main())


def num_pages(known: Prefixes, medium: str) -> int:
    """The number of pages that engines have in a medium."""
    return len(set[str]().union(*known.pages[medium].values()))


def rows(rng: np.random.Generator, count: int, heads: int = HEADS) -> Any:
    return rng.standard_normal((count, heads, DIM)).astype(FLOAT)


@asynccontextmanager
async def restarted_router(first: Cluster) -> AsyncIterator[Cluster]:
    """Another router over the same engines, as after a restart; the first one does nothing."""
    router = Router(SETTINGS.server)
    try:
        async with asyncio.timeout(60):
            await router.connect(str(first.engines.roster), "test-2", first.engines.secret)
        second, members = Cluster(router, first.engines), router.members
        await second.until(
            lambda: (
                len(members.by_name) == len(first.router.members.by_name)
                and all(one.is_known for one in members.by_name.values())
            ),
            "the ids of all engines",
        )
        yield second
    finally:
        router.close()
