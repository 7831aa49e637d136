"""The contents of the live page: four snapshots a second, shared by all viewers."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.doors.http.live.samples import COLUMNS, Samples
from service.doors.kit.pieces import Waiters
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import call_engine
from service.errors import AttndError, NotReady
from service.image.json_text import dump_json
from service.operations.status import INFO, SNAPSHOT
from service.tenants import OPEN, Tenant, tenant_of

if TYPE_CHECKING:
    from service.doors.http.door import Door

PERIOD_S: Final = 0.25
LOAD: Final = ("inflight", "waiting", "sessions")
TREE: Final = "tree_"
WATCHER: Final = tenant_of("default", ("read", "admin"))
"""The tenant for snapshots of an engine with keys; the door has checked its viewers' keys."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page, as an event; every version has another number."""

    number: int
    data: str
    event: bytes


class Feed:
    """The feed of one door, while it has viewers."""

    def __init__(self, door: Door, samples: Samples) -> None:
        self.door = door
        self.samples = samples
        self.parts: dict[str, Part] = {}
        self.viewers = 0
        self.seen = door.loop.time()
        """When the engine replied last."""
        self.is_over = False
        self.news = Waiters(door.turns, self.tenant.namespace)
        self.task = door.loop.create_task(self.run())

    @property
    def tenant(self) -> Tenant:
        return OPEN if self.door.authenticator is None else WATCHER

    async def run(self) -> None:
        """Poll until the service is no longer ready. The load comes from metrics, which a
        busy engine has, too."""
        loop, look = self.door.loop, None
        try:
            while True:
                self.door.link.ready()
                due = loop.time() + PERIOD_S
                if look is None or look.done():
                    look = loop.create_task(self.look())
                await asyncio.wait((look,), timeout=PERIOD_S)
                self.put_load()
                self.news.wake()
                await asyncio.sleep(max(0.0, due - loop.time()))
        except NotReady:
            pass
        finally:
            if look is not None:
                look.cancel()
            self.is_over = True
            self.news.wake()

    async def look(self) -> None:
        """Fetch a snapshot; an error is ignored until the next one."""
        link = self.door.link
        try:
            if "service" not in self.parts:
                info, _ = await call_engine(link, INFO, {}, self.tenant)
                self.put("service", info | {"columns": COLUMNS})
            pool, arrays = await call_engine(link, SNAPSHOT, {}, self.tenant)
        except (AttndError, ProblemText):
            return
        self.seen = self.door.loop.time()
        self.put("pages", pages_of(pool.pop("page_step"), arrays.pop("page_states")))
        self.put("tree", tree_of(pool.pop("namespaces"), arrays))
        self.put("pool", pool)

    def put_load(self) -> None:
        """The engine's load, and how old the snapshot is."""
        blocks = self.door.metrics.totals(LOAD)
        load: dict[str, float] = {key[0]: int(block[0]) for key, block in blocks.items()}
        age = round(self.door.loop.time() - self.seen, 1)
        self.put("load", load | {"age_s": age})
        self.put("summary", self.samples.summary())

    def put(self, name: str, value: Any) -> None:
        """Replace a part, if it has changed."""
        before, data = self.parts.get(name), dump_json(value)
        if before is None or before.data != data:
            number = 1 if before is None else before.number + 1
            self.parts[name] = Part(number, data, event(name, data))

    def after(self, had: dict[str, int]) -> list[bytes]:
        """The events that a viewer lacks; `had` has the numbers of those it was sent."""
        found = []
        for name, part in self.parts.items():
            if had.get(name) != part.number:
                had[name] = part.number
                found.append(part.event)
        if "service" not in had:  # it names the rows' columns
            return found
        first, rows = self.samples.after(had.get("rows", 0))
        if rows:
            had["rows"] = first + len(rows) - 1
            found.append(event("rows", f'{{"first":{first},"rows":[{",".join(rows)}]}}'))
        return found


def event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def pages_of(step: int, states: Array) -> dict[str, Any]:
    """The states of pages, four to a byte, the first in its lowest bits."""
    padded = np.pad(states, (0, -states.size % 4)).reshape(-1, 4)
    packed = (padded << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)
    text = base64.b64encode(packed.tobytes()).decode("ascii")
    return {"step": step, "count": states.size, "states": text}


def tree_of(namespaces: list[str], arrays: dict[str, Array]) -> dict[str, Any]:
    """The tree's columns, by their names."""
    columns = {name.removeprefix(TREE): array.tolist() for name, array in arrays.items()}
    columns["idle_s"] = [round(seconds, 1) for seconds in columns["idle_s"]]
    return {"namespaces": namespaces, **columns}
