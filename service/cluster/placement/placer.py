"""The engines that new sequences go to: what placement asks to know is gathered for it, and what it
has decided is kept in mind."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine
from service.cluster.placement.cost import Load, choose
from service.cluster.placement.inflight_prompts import Underway, Wait
from service.cluster.placement.prefixes import chained_keys
from service.cluster.routing.tags import BETWEEN
from service.core.prefix.keys import Prefix, as_keys
from service.errors import InvalidRequest, NotReady
from service.operations.schema.spec import Prepared

if TYPE_CHECKING:
    from service.cluster.routing.router import Router
    from service.cluster.sharded.ranks import Home

WORTH_WAITING: Final = 2.0
"""A prompt waits for pages that another brings so much longer than until its engine has done what
it was given, and has computed them."""


@dataclass(frozen=True, slots=True)
class New:
    """One sequence to make: its fields as they were given, and its names of pages."""

    fields: dict[str, Any]
    prefix: Prefix | None
    arrays: dict[str, Array]
    underway: Underway = field(default_factory=Underway)
    """Of its prompt, which others may wait for."""

    @property
    def id(self) -> str | None:
        name: str | None = self.fields.get("id")
        return name

    @property
    def ranks(self) -> int:
        """Over how many engines its pages are dealt out."""
        return self.fields.get("ranks") or 1

    @property
    def parent(self) -> str | None:
        name: str | None = self.fields.get("parent")
        return name


def news_of(call: Call, prepared: Prepared) -> list[New]:
    """The sequences to make; each has its own part of a tensor of page names."""
    fields = prepared.fields
    arrays = call.arrays(prepared.layout)
    sums, found = fields.prefix_indptr, []
    for index, one in enumerate(fields.sequences):
        given = one.model_dump(exclude_unset=True)
        if one.shard is not None:
            rule = "a cluster deals pages out by itself: give ranks instead"
            raise InvalidRequest(f"sequences.{index}.shard", given["shard"], rule)
        if one.held is not None:
            rule = "is for one engine: give a prefix instead"
            raise InvalidRequest(f"sequences.{index}.held", given["held"], rule)
        rows: dict[str, Array] = {}
        if one.prefix is not None:
            span = slice(None) if sums is None else slice(sums[index], sums[index + 1])
            rows = {name: array[span] for name, array in arrays.items()}
        found.append(New(given, prefix_of(one.prefix, rows), rows))
    return found


def prefix_of(named: Any, rows: Mapping[str, Array]) -> Prefix | None:
    if named is None:
        return None
    ids = rows.get("token_ids", named.ids_array)
    keys = rows.get("page_keys", named.keys_array)
    raw = None if keys is None else as_keys(np.ascontiguousarray(keys).tobytes())
    return Prefix(ids, raw, named.cache_salt)


def place_one(
    router: Router, call: Call, new: New, passed_over: Collection[str]
) -> tuple[Engine, Wait | None]:
    """The engine for a sequence without a parent, and what to wait for there; one that is known to
    exist goes where it is, to be refused there. Raises NotReady."""
    if new.id is not None:
        tag = router.homes.names.tag((call.tenant.namespace, new.id))
        known = router.members.by_tag.get(tag or "")
        if known is not None and known.tag not in passed_over:
            return known, None
    needed = 1
    if new.prefix is not None:
        needed = max(new.prefix.num_pages(router.members.info.page_size), 1)
    placed = place_pages(router, call, new.prefix, needed, passed_over, new.underway)
    placed.engine.give(placed.there, needed)
    return placed.engine, placed.wait


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine, how many of a prompt's pages it has or is to have, and what to wait for."""

    engine: Engine
    there: int = 0
    wait: Wait | None = None


def place_pages(
    router: Router,
    call: Call,
    prefix: Prefix | None,
    needed: int,
    passed_over: Collection[str],
    underway: Underway | None = None,
) -> Placed:
    """The engine for so many pages, of which the first have the prefix's names. Raises NotReady."""
    members = router.members
    among = {
        one.tag: one for one in members.engines if one.takes_new and one.tag not in passed_over
    }
    if not among:
        return Placed(members.idlest())
    loads = {tag: one.load_now for tag, one in among.items()}
    if prefix is None:
        placed = Placed(among[choose(loads, {}, needed)])
    else:
        placed = place_named(router, call, prefix, needed, among, loads, underway)
    placed.engine.promised += max(needed - placed.there, 1)
    return placed


def place_named(
    router: Router,
    call: Call,
    prefix: Prefix,
    needed: int,
    among: Mapping[str, Engine],
    loads: Mapping[str, Load],
    underway: Underway | None,
) -> Placed:
    """As `place_pages`, of these engines, for pages with names."""
    space, now = call.tenant.namespace, time.monotonic()
    known = router.members.prefixes_of(space)
    keys, again = tee(chained_keys(prefix, space, router.members.info.page_size))
    matched = known.matched(keys, now)
    chosen = choose(loads, matched, needed)
    there = min(matched.get(chosen, 0), needed)
    first = list(islice(again, there))
    wait, (cached, other) = None, known.awaited(chosen, first)
    if other is not None:
        wait = Wait(other, worth_waiting_s(loads[chosen], cached, there))
    known.expect(chosen, again, now, underway)
    return Placed(among[chosen], there, wait)


def worth_waiting_s(load: Load, cached: int, there: int) -> float:
    """How long a prompt waits at an engine for its pages `cached:there`, which another brings."""
    return WORTH_WAITING * (load.wait_s + load.pace.span_s(float(cached), there))


def place_ranks(router: Router, new: New, passed_over: Collection[str]) -> Home:
    """The engines with the most room, as many as wanted.

    Raises InvalidRequest where the cluster has not so many, NotReady where not so many take new
    sequences at the moment.
    """
    members = router.members
    there = [one for one in members.engines if one.takes_new]
    if new.ranks > len(members.by_name):
        rule = f"must be at most {len(members.by_name)}, the engines that there are"
        raise InvalidRequest("ranks", new.ranks, rule)
    if new.ranks > len(there):
        told = f"{len(there)} of {len(members.by_name)} engines take new sequences"
        raise NotReady(f"ranks = {new.ranks}: {told} at the moment: retry later, or ask for fewer")
    there.sort(key=lambda one: (one.tag in passed_over, -one.load_now.room, one.name))
    chosen = there[: new.ranks]
    for engine in chosen:
        engine.promised += 1
    home = members.home(BETWEEN.join(engine.tag for engine in chosen))
    if home is None:
        raise RuntimeError("an engine went while nobody waited: this is a bug")
    return home
