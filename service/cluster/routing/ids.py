"""The map from ids to engines.

An id made by the router ends in the tag of its engine, the first digits of the engine's
`instance_id`: a restarted engine has another tag. Chosen ids are in the map. The router reads the
ids of an engine that it meets, and makes all others itself, so the map has every chosen id but
those that sessions make at an engine's own socket. For an id that is not in the map all engines are
asked once; the first one that has it serves it.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from service.cluster.membership.engine import TAG_DIGITS, EngineSession, in_time
from service.cluster.membership.members import Members
from service.cluster.routing.outcomes import unknown_ids
from service.cluster.routing.replies import results_of
from service.doors.kit.problems import ProblemText
from service.errors import LostSequence, UnknownSequence
from service.operations.rows import GATHER
from service.operations.sequences import LIST_SEQUENCES, MAX_LISTED
from service.operations.status import LIST_NAMESPACES
from service.tenants import OPEN, SCOPES, Tenant, tenant_of

TAGGED: Final = re.compile(rf".*\.([0-9a-f]{{{TAG_DIGITS}}})")
IDS_PER_CALL: Final = 1024
"""Maximum number of ids in one question to all engines."""
MAX_LOST: Final = 2**18
"""Number of chosen ids of dead engines that are remembered."""
MAX_IDS: Final = 2**15
"""Number of ids in remembered batches."""
SPARE_IDS: Final = 4096
"""An engine's ids are read again once the map has this many more than twice its sequences: they
have expired, or sessions have deleted them."""
Name = tuple[str, str]
"""Namespace and id."""
Places = dict[EngineSession, list[int]]
"""The positions of a batch's sequences, by their engine; that of the first sequence comes first."""


def new_id(tag: str) -> str:
    """A unique id: 80 random bits, and the engine's tag."""
    return f"seq-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}.{tag}"


def tag_in(name: str) -> str | None:
    """The tag that an id ends in. A caller's id may look as if it had one."""
    found = TAGGED.fullmatch(name)
    return None if found is None else found.group(1)


class Ids:
    """The map of one router."""

    def __init__(self, members: Members) -> None:
        self.members = members
        members.ids = self
        self.entries: dict[Name, tuple[str, int]] = {}
        """The engine's tag, and when it was entered."""
        self.clock = 0
        """Counts entries."""
        self.by_tag: dict[str, set[Name]] = {}
        self.imports: dict[Name, float] = {}
        """Until when, on `time.monotonic()`, an import of an id may be under way, in that order."""
        self.lost: deque[tuple[Name, str]] = deque()
        """Ids of dead engines, which stay in the map, the oldest first."""
        self.batches: dict[tuple[str, tuple[str, ...]], Places] = {}
        """The places of batches, which the layers of a step repeat, since the last of `changes`."""
        self.changes, self.num_ids = (0, 0), 0
        self.num_removed = 0
        """Counts entries that were removed."""
        self.held: dict[Name, asyncio.Event] = {}
        """Ids that a call is making now, and the end of that call."""

    # entries

    def home(self, name: str, tenant: Tenant) -> EngineSession | None:
        """Where a sequence should be; None where that is not known, or cannot be called."""
        return self.members.by_tag.get(self.tag((tenant.namespace, name)))

    def tag(self, name: Name) -> str:
        """The tag of the engine that an id is at, by the map or by the id; empty for none."""
        found = self.entries.get(name)
        return (tag_in(name[1]) or "") if found is None else found[0]

    def learn(self, tenant: Tenant, names: Iterable[str], tag: str) -> None:
        """These sequences are at the engine of a tag."""
        for name in names:
            if tag_in(name) != tag:
                key = tenant.namespace, name
                if self.tag(key) not in ("", tag):
                    self.remove(key)
                self.clock += 1
                self.entries[key] = tag, self.clock
                self.by_tag.setdefault(tag, set()).add(key)

    def importing(self, tenant: Tenant, name: str, for_s: float) -> None:
        """An import of this id is under way, for so long without another call for it."""
        key, now = (tenant.namespace, name), time.monotonic()
        self.imports.pop(key, None)
        self.imports[key] = now + for_s
        while (oldest := next(iter(self.imports))) != key and self.imports[oldest] <= now:
            del self.imports[oldest]

    def forget(self, tenant: Tenant, names: Iterable[str], since: int) -> None:
        """These sequences were not there at some time after `since`, a value of `clock`. Keeps
        those that may have been made afterwards."""
        now = time.monotonic()
        for name in names:
            key = tenant.namespace, name
            is_old = key in self.entries and self.entries[key][1] <= since
            if is_old and self.imports.get(key, 0.0) < now:
                self.remove(key)

    def remove(self, key: Name) -> None:
        self.num_removed += 1
        tag, _ = self.entries.pop(key, ("", 0))
        self.by_tag.get(tag, set()).discard(key)
        self.imports.pop(key, None)

    def bury(self, tag: str) -> None:
        """The engine of a tag is dead. Its ids stay in the map for a while: they are lost."""
        self.lost.extend((key, tag) for key in self.by_tag.pop(tag, ()))
        while len(self.lost) > MAX_LOST:
            key, of = self.lost.popleft()
            if key in self.entries and self.entries[key][0] == of:
                self.remove(key)

    # new ids

    async def hold(self, tenant: Tenant, names: Iterable[str]) -> list[Name]:
        """A call makes sequences of these ids, until it releases what this returns: other calls
        that make one of them wait for it. Where the map does not have an id, it is unknown to all
        calls until then."""
        keys = [(tenant.namespace, name) for name in names]
        while not self.held.keys().isdisjoint(keys):
            await next(self.held[key] for key in keys if key in self.held).wait()
        self.held |= dict.fromkeys(keys, asyncio.Event())
        return keys

    def release(self, keys: Sequence[Name]) -> None:
        """The call that made these ids is over."""
        for key in keys:
            self.held.pop(key).set()

    def is_only_made(self, name: str, tenant: Tenant) -> bool:
        """Whether a call makes this id, which the map does not have."""
        key = tenant.namespace, name
        return key in self.held and key not in self.entries

    def home_of_new(self, name: str, tenant: Tenant) -> EngineSession | None:
        """The engine that a new sequence of an id is sent to: the one of the map, which knows
        whether it has the id still. Raises NotReady where that is not known, or cannot be called
        now."""
        tag = self.tag((tenant.namespace, name))
        home = self.members.by_tag.get(tag)
        if home is None:
            if tag:
                self.members.check_reachable([tag])
            self.members.check_known()
        return home

    async def taken(self, engine: EngineSession, names: Sequence[str], tenant: Tenant) -> list[str]:
        """Those of some ids that an engine has or imports; forgets the others. Raises ProblemText,
        NotReady."""
        since, now = self.clock, time.monotonic()
        there = await known_at(engine, names, self.members.acting_for(tenant))
        there += [n for n in names if self.imports.get((tenant.namespace, n), 0.0) > now]
        self.forget(tenant, set(names).difference(there), since)
        return there

    # an engine's ids

    async def read(self, engine: EngineSession) -> None:
        """Reads the ids of all sequences of an engine, and removes entries of others. Raises
        ProblemText, NotReady."""
        gone, since = set(self.by_tag.get(engine.tag, ())), self.clock
        for tenant in await self.tenants(engine):
            after: dict[str, str] = {}
            while True:
                asked = {"limit": MAX_LISTED, **after}
                page = (await engine.question(LIST_SEQUENCES, tenant, asked, is_poll=True)).fields
                engine.heard_s = time.monotonic()
                names = [one["id"] for one in page["sequences"]]
                self.learn(tenant, names, engine.tag)
                gone.difference_update((tenant.namespace, name) for name in names)
                if page["next"] is None:
                    break
                after = {"after": page["next"]}
        for namespace, name in gone:
            if self.tag((namespace, name)) == engine.tag:
                self.forget(tenant_of(namespace, SCOPES), [name], since)

    async def tenants(self, engine: EngineSession) -> list[Tenant]:
        """All that may have sequences there."""
        if not self.members.has_keys:
            return [OPEN]
        asked = engine.question(LIST_NAMESPACES, self.members.tenant, {}, is_poll=True)
        return [tenant_of(name, SCOPES) for name in (await asked).fields["namespaces"]]

    def has_too_many(self, tag: str, num_sequences: int) -> bool:
        """Whether many entries of an engine must be of sequences that it has no more."""
        return len(self.by_tag.get(tag, ())) > 2 * num_sequences + SPARE_IDS

    # the engines of calls

    def known_places(self, ids: Sequence[str], tenant: Tenant) -> Places | None:
        """As `locate`, from memory; None where one of the sequences is not known."""
        changes = self.members.changes, self.num_removed
        if self.changes != changes or self.num_ids > MAX_IDS:
            self.batches.clear()
            self.changes, self.num_ids = changes, 0
        batch = tenant.namespace, tuple(ids)
        if (places := self.batches.get(batch)) is None:
            places = {}
            for at, name in enumerate(ids):
                if (home := self.home(name, tenant)) is None:
                    return None
                places.setdefault(home, []).append(at)
            self.batches[batch] = places
            self.num_ids += len(ids)
        return places

    async def locate(self, ids: Sequence[str], tenant: Tenant) -> Places:
        """The engine of each sequence. Raises UnknownSequence, LostSequence, NotReady."""
        while (places := self.known_places(ids, tenant)) is None:
            # an engine may leave while the others are asked: then they are asked again
            unknown = [name for name in dict.fromkeys(ids) if self.home(name, tenant) is None]
            await self.find(unknown, tenant)
        return places

    async def find(self, ids: Sequence[str], tenant: Tenant) -> None:
        """Asks all engines once for sequences that are not in the map. Raises as `locate`."""
        if made := [name for name in ids if self.is_only_made(name, tenant)]:
            raise UnknownSequence(made)
        acting, missing, since = self.members.acting_for(tenant), list(ids), self.clock
        changes, errors = self.members.changes, list[BaseException]()
        for begin in range(0, len(ids), IDS_PER_CALL):
            some, engines = ids[begin : begin + IDS_PER_CALL], self.members.engines
            looks = await results_of([known_at(engine, some, acting) for engine in engines])
            found: dict[str, EngineSession] = {}
            for engine, known in zip(engines, looks, strict=True):
                if isinstance(known, BaseException):
                    await self.members.wait_for_fate([engine.tag])
                    errors += [] if self.members.is_dead(engine.tag) else [known]
                else:
                    found = dict.fromkeys(known, engine) | found
            for name, engine in found.items():
                if not self.is_only_made(name, tenant):  # since the engines were asked
                    self.learn(tenant, [name], engine.tag)
                    missing.remove(name)
        if not missing:
            return
        if errors:
            raise errors[0]
        tags = {name: self.tag((tenant.namespace, name)) for name in missing}
        await self.members.wait_for_fate(list(tags.values()))
        self.members.check_reachable()
        if self.members.changes != changes:
            return
        self.forget(tenant, [name for name in missing if tags[name] in self.members.by_tag], since)
        lost = [name for name, tag in tags.items() if tag and tag not in self.members.by_tag]
        raise LostSequence(lost) if lost else UnknownSequence(missing)


async def known_at(engine: EngineSession, ids: Sequence[str], tenant: Tenant) -> list[str]:
    """The sequences that an engine has: a gather of no rows reports the unknown ones. Raises
    ProblemText, NotReady."""
    fields = {"layer": 0, "sequences": list(ids), "stop": 0}
    try:
        await in_time(engine.question(GATHER, tenant, fields), engine)
    except ProblemText as error:
        if not (unknown := set(unknown_ids(error))):
            raise
        return [name for name in ids if name not in unknown]
    return list(ids)
