"""Operations that every engine is asked: what each is asked, and how their answers become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from attnd.wire.dtypes import Array

from service.cluster.membership.engine import Call, Engine, Told
from service.cluster.routing.locator import in_time
from service.cluster.routing.replies import each
from service.errors import NotReady

if TYPE_CHECKING:
    from service.cluster.routing.router import Router

Fields = dict[str, Any]
Join = Callable[[Fields, Sequence[Fields]], Fields]
"""From the request's fields and the engines' answers."""


def added(_: Fields, answers: Sequence[Fields]) -> Fields:
    """Every number is the sum."""
    return {name: sum(one[name] for one in answers) for name in answers[0]}


def pool(_: Fields, answers: Sequence[Fields]) -> Fields:
    """Pages are added; sharing is that of all tokens, by the pages that hold them."""
    apart = {"sharing_ratio", "integrity"}
    joined = added(_, [{name: one[name] for name in one.keys() - apart} for one in answers])
    weights = [one["referenced"] for one in answers]
    shared = sum(w * one["sharing_ratio"] for w, one in zip(weights, answers, strict=True))
    broken = [one["integrity"] for one in answers if one["integrity"] != "ok"]
    joined["sharing_ratio"] = shared / sum(weights) if sum(weights) else 1.0
    joined["integrity"] = "; ".join(broken) or "ok"
    return joined


def info(_: Fields, answers: Sequence[Fields]) -> Fields:
    """Of engines that are alike: sizes are added, and one that was started anew, came or went makes
    another `instance_id`."""
    instances = sorted(one["instance_id"] for one in answers)
    digest = blake2b(" ".join(instances).encode(), digest_size=16).hexdigest()
    limits = answers[0]["limits"]
    most = sum(one["limits"]["max_sequences"] for one in answers)
    return answers[0] | {
        "instance_id": digest if len(answers) > 1 else instances[0],
        "num_pages": sum(one["num_pages"] for one in answers),
        "limits": limits | {"max_sequences": most},
    }


def listed(asked: Fields, answers: Sequence[Fields]) -> Fields:
    """A page of the list of all, by id."""
    limit = asked["limit"]
    parts: dict[str, list[Fields]] = {}
    for one in (one for part in answers for one in part["sequences"]):
        parts.setdefault(one["id"], []).append(one)
    every = [one_of(parts[name]) for name in sorted(parts)]
    has_more = len(every) > limit or any(part["next"] is not None for part in answers)
    shown = every[:limit]
    return {"sequences": shown, "next": shown[-1]["id"] if shown and has_more else None}


def one_of(parts: list[Fields]) -> Fields:
    """A sequence, from the replies of engines that each hold a shard, or from that of one that
    holds it whole."""
    if whole := [one for one in parts if "shard" not in one]:
        return whole[0]
    from service.cluster.sharded.shard_replies import whole_view

    return whole_view(sorted(parts, key=lambda one: int(one["shard"]["rank"])))


def namespace(asked: Fields, answers: Sequence[Fields]) -> Fields:
    """Quotas and use are added; no limit on one engine is no limit."""
    joined: Fields = {"name": answers[0]["name"]}
    for name in answers[0].keys() - {"name"}:
        values = [one[name] for one in answers]
        joined[name] = None if None in values else sum(values)
    return joined


def most(_: Fields, answers: Sequence[Fields]) -> Fields:
    """A pin covers as many pages as on the engine that has most of them."""
    return max(answers, key=lambda one: one["num_pages"])


def union(_: Fields, answers: Sequence[Fields]) -> Fields:
    return {"namespaces": sorted({name for one in answers for name in one["namespaces"]})}


JOINS: Final[Mapping[str, Join]] = {
    "list_sequences": listed,
    "info": info,
    "pool": pool,
    "pin": most,
    "unpin": lambda _, answers: {},
    "clear": added,
    "get_namespace": namespace,
    "set_namespace": namespace,
    "list_namespaces": union,
}
IF_THERE: Final = frozenset({"pin", "unpin"})
"""An engine that does not have the page is no failure while another does."""
WITHOUT_SILENT: Final = frozenset({"info", "pool", "engines", "snapshot", "match_prefix"})
"""What is told of the engines that answer, where others do not."""


def shares(name: str, asked: Fields, count: int) -> list[Fields]:
    """What each of `count` engines is asked: quotas are shared out evenly, all else is the same."""
    parts = [dict(asked) for _ in range(count)]
    if name == "set_namespace":
        for field in ("max_pages", "reserved_pages"):
            if asked.get(field) is not None:
                for part, share in zip(parts, share_out(asked[field], count), strict=True):
                    part[field] = share
    return parts


def share_out(total: int, count: int) -> list[int]:
    """`total` in `count` parts that differ by one at most."""
    return [total // count + (index < total % count) for index in range(count)]


async def ask_all(
    router: Router,
    call: Call,
    parts: Sequence[dict[str, Any]],
    arrays: dict[str, Array] | None = None,
    *,
    if_there: bool = False,
) -> list[tuple[Engine, Told]]:
    """What the engines answer, each to its part. One that is lost meanwhile counts as not there.

    Raises the first refusal; `if_there`: only where all refuse. Raises NotReady without engines.
    """
    asked = router.members.engines
    may_miss = call.operation.name in WITHOUT_SILENT
    calls = [
        ask_one_of_all(engine, call, part, arrays, may_miss=may_miss)
        for engine, part in zip(asked, parts, strict=True)
    ]
    told: list[tuple[Engine, Told]] = []
    errors: list[BaseException] = []
    for engine, one in zip(asked, await each(calls), strict=True):
        if isinstance(one, Told):
            told.append((engine, one))
        elif not (may_miss and isinstance(one, NotReady) and len(asked) > 1):
            await router.members.fate_of([engine.tag])
            if not router.members.is_gone(engine.tag) or not if_there:
                errors.append(one)
    if errors and not (if_there and told):
        raise errors[0]
    if not told:
        router.members.idlest()  # raises for want of engines
    return told


async def ask_one_of_all(
    engine: Engine,
    call: Call,
    part: dict[str, Any],
    arrays: dict[str, Array] | None,
    *,
    may_miss: bool,
) -> Told:
    """What an engine answers; where its answer `may_miss`, it is not waited for without end."""
    if not may_miss:
        return await engine.ask(call, part, arrays)
    return await in_time(engine.ask(call, part, arrays), engine)
