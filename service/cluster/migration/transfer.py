"""Copies one sequence from an engine to another: an export that becomes an import, in parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import ASK_S, Engine, EngineReply
from service.cluster.membership.members import Members
from service.cluster.placement.cost import choose
from service.cluster.routing.locator import known_at
from service.cluster.routing.outcomes import NEXT_ENGINE, outcome_of
from service.cluster.routing.replies import gather_all, results_of
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady
from service.operations.prefix import COMMIT, MATCH
from service.operations.schema.spec import Operation
from service.operations.sequences import DELETE_SEQUENCES
from service.operations.transfer import CANCEL_IMPORT, EXPORT, IMPORT, MAX_BESIDE, Header
from service.tenants import Tenant

ANCHOR_TTL_S: Final = 30.0
"""Copies left behind by a door that died are deleted after this; a living door keeps using them."""


@dataclass(slots=True)
class Progress:
    """The progress of draining one engine: counts of moved sequences, pins and leases, and the
    reasons why others stayed at the last attempt."""

    moved: int = 0
    """Sequences."""
    holds: int = 0
    """Pins and leases."""
    num_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)
    """Number of sequences, pins, leases and imports, by the reason."""

    def __str__(self) -> str:
        moved = f"moved {self.moved} sequences, {self.holds} pins and leases, "
        moved += f"{self.num_bytes >> 20} MiB"
        return "; ".join([moved, *(f"{count} stay: {why}" for why, count in self.stayed.items())])


@dataclass(slots=True)
class Family:
    """Sequences with a common ancestor. `anchors` are forks of them that never change, at the
    source and at the `target`: what shares pages with an anchor is not copied again."""

    tenant: Tenant
    ids: list[str]
    """Parents first."""
    target: Engine | None = None
    anchors: list[str] = field(default_factory=list)
    all_anchors: list[str] = field(default_factory=list)
    """Includes anchors that have not reached the target."""

    async def keep_anchors(self, members: Members) -> None:
        """Uses the anchors regularly, so that they do not expire."""
        while True:
            await asyncio.sleep(ANCHOR_TTL_S / 4)
            anchors = list(self.all_anchors)
            await results_of([use(one, anchors, self.tenant) for one in members.engines if anchors])

    async def delete_anchors(self, members: Members) -> None:
        ids = {"ids": self.all_anchors}
        deleting = [ask(one, DELETE_SEQUENCES, self.tenant, ids) for one in members.engines]
        await results_of(deleting)


async def use(engine: Engine, ids: Sequence[str], tenant: Tenant) -> None:
    """Restarts the time to live of those sequences that the engine has."""
    if there := await known_at(engine, ids, tenant):
        await known_at(engine, there, tenant)


def families_of(tenant: Tenant, views: Sequence[dict[str, Any]]) -> list[Family]:
    """Sequences grouped by their oldest known ancestor, parents first."""
    parents = {view["id"]: view["parent"] for view in views}
    families: dict[str, list[tuple[int, str]]] = {}
    for view in views:
        root, depth, seen = view["id"], 0, {view["id"]}
        while (parent := parents.get(root)) is not None and parent not in seen:
            root, depth = parent, depth + 1
            seen.add(parent)
        families.setdefault(root, []).append((depth, view["id"]))
    return [Family(tenant, [name for _, name in sorted(ids)]) for ids in families.values()]


PART_BYTES: Final = 4 * 2**20
ENGINE_ERRORS: Final = (ProblemText, AttndError, OSError, TimeoutError)
"""Errors of a question to an engine."""


class NoRoom(Exception):
    """No other engine accepts the sequence; the text is the last one's reason."""


def reason(error: Exception) -> str:
    """Why a sequence, pin or lease stays."""
    if isinstance(error, ProblemText):
        return str(error.problem["code"])
    return str(error) if isinstance(error, NoRoom) else f"{type(error).__name__}: {error}"


async def ask(
    engine: Engine,
    operation: Operation,
    tenant: Tenant,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Array] | None = None,
) -> EngineReply:
    """Raises ProblemText, NotReady, TimeoutError."""
    async with asyncio.timeout(ASK_S + 1.0):
        return await engine.question(operation, tenant, fields, arrays)


@dataclass(slots=True)
class Transfer:
    """An import of a `sequence` that `target` has begun, of the export `header`."""

    source: Engine
    target: Engine
    tenant: Tenant
    sequence: str
    header: dict[str, Any]
    names: dict[str, Array]
    """The names of its committed pages."""
    next_part: int
    """First part that the target wants: it has found those before in its cache."""
    digest: str
    """Of the parts sent."""
    num_bytes: int = 0

    async def run(self) -> None:
        """Copies the wanted parts; sends each while the next one is exported."""
        last = self.header["num_parts"]
        if self.next_part == last:
            return
        part = await self.export(self.next_part)
        for number in range(self.next_part, last):
            sending = self.send(number, self.digest, part)
            self.digest = part.fields["digest"]
            self.num_bytes += sum(rows.nbytes for rows in part.arrays.values())
            exporting = [self.export(number + 1)] if number + 1 < last else []
            part = (await gather_all([sending, *exporting]))[-1]

    async def export(self, number: int) -> EngineReply:
        """A part, with the digest of all parts so far."""
        fields: dict[str, Any] = {"id": self.sequence, "part": number, "before": self.digest}
        fields |= {name: self.header[name] for name in ("generation", "part_bytes")}
        return await ask(self.source, EXPORT, self.tenant, fields)

    async def send(self, number: int, before: str, part: EngineReply) -> EngineReply:
        fields = {"id": self.sequence, "part": number, "before": before}
        fields["digest"] = part.fields["digest"]
        return await ask(self.target, IMPORT, self.tenant, fields, part.arrays)

    async def finish(self) -> None:
        end = {"id": self.sequence, "digest": self.digest}
        await ask(self.target, IMPORT, self.tenant, end)

    async def commit(self) -> None:
        """Commits the pages of a copy under the names that they had."""
        if self.names:
            same = {name: self.header.get(name) for name in ("cache_salt", "extra")}
            fields = {"id": self.sequence, **{name: one for name, one in same.items() if one}}
            with suppress(ProblemText):  # the cache has other pages under these names
                await ask(self.target, COMMIT, self.tenant, fields, self.names)


async def begin_transfer(
    members: Members, source: Engine, family: Family, sequence: str
) -> Transfer:
    """Exports a sequence's header, and begins its import where its family is, or has room. The
    import starts with the pages that it shares with an anchor, which both engines have. Raises
    NoRoom."""
    tenant, beside = family.tenant, family.anchors[-MAX_BESIDE:]
    asked: dict[str, Any] = {"id": sequence, "part_bytes": PART_BYTES}
    asked |= {"beside": beside} if beside else {}
    export = await ask(source, EXPORT, tenant, asked)
    header, digest = export.fields["header"], export.fields["digest"]
    shared = export.fields["shared"]
    fields = {"id": sequence, "header": header, "digest": digest, "idle_s": 4 * ASK_S}
    if shared and max(shared):
        size = header["page_size"]
        most = min(max(shared), min(header["lengths"]) // size * size)
        fields |= {"base": beside[shared.index(max(shared))], "base_len": most}
    target, state = await begin_somewhere(members, source, family, fields, export.arrays)
    family.target = target
    return Transfer(
        source,
        target,
        tenant,
        sequence,
        header,
        export.arrays,
        state["next_part"],
        state["digest"] or digest,
    )


async def begin_somewhere(
    members: Members,
    source: Engine,
    family: Family,
    fields: dict[str, Any],
    names: dict[str, Array],
) -> tuple[Engine, dict[str, Any]]:
    """An engine that has begun an import, and the import's state. A family stays together: once
    one of it was moved, the others go to the same engine or nowhere. Raises NoRoom."""
    excluded: set[str] = {source.tag}
    header = Header.model_validate(fields["header"])
    matched: dict[str, int] = {}
    if names and family.target is None:
        matched = await cached_pages(members, family.tenant, header.cache_salt, names)
    why = "no other engine takes new sequences"
    while True:
        among = {tag: one for tag, one in members.open_engines.items() if tag not in excluded}
        if family.anchors and family.target is not None:
            among = {tag: one for tag, one in among.items() if one is family.target}
        if not among:
            raise NoRoom(why)
        loads = {tag: one.load_now for tag, one in among.items()}
        target = among[choose(loads, matched, max(header.num_pages, 1))]
        try:
            return target, await begin(target, family.tenant, fields, names)
        except NotReady as error:
            why = str(error)
        except ProblemText as error:
            if outcome_of(error) not in NEXT_ENGINE:
                raise
            why = f"{target.name} replies {error.problem['code']}"
        excluded.add(target.tag)


async def cached_pages(
    members: Members, tenant: Tenant, cache_salt: str, names: dict[str, Array]
) -> dict[str, int]:
    """The number of these pages that each engine has cached, by its tag."""
    engines, fields = members.engines, {"cache_salt": cache_salt, "lease_s": 0.0}
    replies = await results_of([ask(one, MATCH, tenant, fields, names) for one in engines])
    return {
        engine.tag: one.fields["num_pages"]
        for engine, one in zip(engines, replies, strict=True)
        if isinstance(one, EngineReply)
    }


async def begin(
    target: Engine,
    tenant: Tenant,
    fields: dict[str, Any],
    names: dict[str, Array],
) -> dict[str, Any]:
    """The state of an import that begins. An earlier import of the same name, of the sequence as it
    was before, is cancelled."""
    try:
        return (await ask(target, IMPORT, tenant, fields, names)).fields
    except ProblemText as error:
        if error.problem["code"] != "import_exists":
            raise
    await ask(target, CANCEL_IMPORT, tenant, {"id": fields["id"]})
    return (await ask(target, IMPORT, tenant, fields, names)).fields
