"""One sequence copied from an engine to another: an export that becomes an import, part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Engine, Told
from service.cluster.placement.cost import choose
from service.cluster.placement.create import may_pass_over
from service.cluster.routing.replies import each
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady
from service.operations.prefix import COMMIT, MATCH
from service.operations.schema.spec import Operation
from service.operations.transfer import CANCEL_IMPORT, EXPORT, IMPORT, MAX_BESIDE, Header
from service.tenants import Tenant

if TYPE_CHECKING:
    from service.cluster.migration.families import Family
    from service.cluster.routing.router import Router

ASK_S: Final = 10.0
PART_BYTES: Final = 4 * 2**20
REFUSED: Final = (ProblemText, AttndError, OSError, TimeoutError)
"""What asking an engine may raise."""


class NoRoom(Exception):
    """No other engine takes it; what the last one said."""


@dataclass(slots=True)
class Begun:
    """An import of a `sequence` that `target` has begun: what is exported by `header`, of which
    `next_part` is the first that is wanted; its `names` of pages; the digest of what has gone."""

    target: Engine
    tenant: Tenant
    sequence: str
    header: dict[str, Any]
    names: dict[str, Array]
    next_part: int
    digest: str
    num_bytes: int = 0
    shard: dict[str, Any] | None = None
    """Which part of the sequence it is; None: all of it."""

    @property
    def num_wanted(self) -> int:
        """Parts that are not there from the beginning."""
        wanted: int = self.header["num_parts"] - self.next_part
        return wanted


async def ask(
    engine: Engine,
    operation: Operation,
    tenant: Tenant,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Array] | None = None,
) -> Told:
    """Raises ProblemText, NotReady, TimeoutError."""
    async with asyncio.timeout(ASK_S + 1.0):
        return await engine.ask(engine.own(operation, tenant, ASK_S), fields, arrays)


async def begin_copy(router: Router, source: Engine, family: Family, sequence: str) -> Begun:
    """Export a sequence's header, and begin its import where its family is, or has room. It begins
    with what it shares with one of the anchors, which both engines have. Raises NoRoom."""
    tenant, beside = family.tenant, family.anchors[-MAX_BESIDE:]
    asked: dict[str, Any] = {"id": sequence, "part_bytes": PART_BYTES}
    asked |= {"beside": beside} if beside else {}
    asked |= {"shard": family.shard} if family.shard else {}
    told = await ask(source, EXPORT, tenant, asked)
    header, digest = told.fields["header"], told.fields["digest"]
    shared = told.fields["shared"]
    fields = {"id": sequence, "header": header, "digest": digest, "idle_s": 4 * ASK_S}
    if family.shard:
        known = {"epoch": told.fields["epoch"], "lengths": told.fields["whole"]}
        fields["shard"] = family.shard | known
    if shared and max(shared):
        size = header["page_size"]
        most = min(max(shared), min(header["lengths"]) // size * size)
        fields |= {"base": beside[shared.index(max(shared))], "base_len": most}
    target, state = await placed(router, source, family, fields, told.arrays)
    family.target = target
    return Begun(
        target,
        tenant,
        sequence,
        header,
        told.arrays,
        state["next_part"],
        state["digest"] or digest,
        shard=family.shard,
    )


async def placed(
    router: Router, source: Engine, family: Family, fields: dict[str, Any], names: dict[str, Array]
) -> tuple[Engine, dict[str, Any]]:
    """An engine that has begun an import. A family stays together; what has no room there goes
    nowhere else, as long as others of it have gone there."""
    passed_over: set[str] = {source.tag, *family.tags}
    header = Header.model_validate(fields["header"])
    needed, matched = header.num_pages, dict[str, int]()
    if names and family.target is None:
        matched = await matched_there(router, family.tenant, header.cache_salt, names)
    why = "no other engine takes new sequences"
    while True:
        open_ = {
            one.tag: one
            for one in router.members.engines
            if one.takes_new and one.tag not in passed_over
        }
        if family.anchors and family.target is not None:
            open_ = {tag: one for tag, one in open_.items() if one is family.target}
        if not open_:
            raise NoRoom(why)
        loads = {tag: one.load_now for tag, one in open_.items()}
        target = open_[choose(loads, matched, max(needed, 1))]
        try:
            replaces = family.shard is None
            state = await begin(target, family.tenant, fields, names, replaces=replaces)
            return target, state
        except NotReady as error:
            why = str(error)
        except ProblemText as refused:
            if not may_pass_over(refused):
                raise
            why = f"{target.name} says {refused.problem['code']}"
        passed_over.add(target.tag)


async def matched_there(
    router: Router, tenant: Tenant, cache_salt: str, names: dict[str, Array]
) -> dict[str, int]:
    """How many of these pages the engines have already, by their tags."""
    engines = router.members.engines
    looked = {"cache_salt": cache_salt, "lease_s": 0.0}
    told = await each([ask(one, MATCH, tenant, looked, names) for one in engines])
    both = zip(engines, told, strict=True)
    return {engine.tag: one.fields["num_pages"] for engine, one in both if isinstance(one, Told)}


async def begin(
    target: Engine,
    tenant: Tenant,
    fields: dict[str, Any],
    names: dict[str, Array],
    *,
    replaces: bool = True,
) -> dict[str, Any]:
    """How far an import is that begins; one of the sequence as it was before is given up, but for a
    part that is moved, since another part may be on its way there as well."""
    try:
        return (await ask(target, IMPORT, tenant, fields, names)).fields
    except ProblemText as refused:
        if refused.problem["code"] != "import_exists" or not replaces:
            raise
    await ask(target, CANCEL_IMPORT, tenant, {"id": fields["id"]})
    return (await ask(target, IMPORT, tenant, fields, names)).fields


async def copy(source: Engine, begun: Begun) -> None:
    """All parts that are wanted, each brought while the next one comes. Raises what engines
    refuse."""
    last = begun.header["num_parts"]
    if begun.next_part == last:
        return
    part = await fetch(source, begun, begun.next_part)
    for number in range(begun.next_part, last):
        bringing = bring(begun, number, begun.digest, part)
        begun.digest = part.fields["digest"]
        begun.num_bytes += sum(rows.nbytes for rows in part.arrays.values())
        coming = [fetch(source, begun, number + 1)] if number + 1 < last else []
        for told in await each([bringing, *coming]):
            if isinstance(told, BaseException):
                raise told
            part = told


async def fetch(source: Engine, begun: Begun, number: int) -> Told:
    """A part, with its digest upon that of the one before."""
    header = begun.header
    which = {name: header[name] for name in ("generation", "part_bytes")}
    if begun.shard is not None:
        which["shard"] = begun.shard
    asked = {"id": begun.sequence, "part": number, "before": begun.digest}
    return await ask(source, EXPORT, begun.tenant, which | asked)


async def bring(begun: Begun, number: int, before: str, part: Told) -> Told:
    brought = {"id": begun.sequence, "part": number, "before": before}
    brought["digest"] = part.fields["digest"]
    return await ask(begun.target, IMPORT, begun.tenant, brought, part.arrays)


async def end_copy(begun: Begun) -> None:
    """The import gets its name."""
    ended = {"id": begun.sequence, "digest": begun.digest}
    await ask(begun.target, IMPORT, begun.tenant, ended)


async def commit_copy(begun: Begun) -> None:
    """The pages of a copy that nobody changes get the names that they had."""
    if begun.names:
        salt = {"id": begun.sequence, "cache_salt": begun.header["cache_salt"]}
        with suppress(ProblemText):  # the cache has others by these names
            await ask(begun.target, COMMIT, begun.tenant, salt, begun.names)
