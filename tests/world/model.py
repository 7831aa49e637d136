"""The oracle of one engine: names, marks, leases, imports and quotas after each of its answers.

The engine answers calls in some order; the model takes them in that order and says whether each
answer was allowed. What calls do with the rows of sequences is in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from config.settings import ServerSettings
from kernels.backend import PoolGeometry
from tests.world.calls import Op, Rows, Sequences, check

FAULT_OF: Final = {
    "cancelled": {"connection breaks"},
    "internal": {"kernel fails", "launch fails"},
    "overloaded": {"no memory"},
    "invalid_request": {"unsupported"},
    "out_of_pages": {"quota changes"},
}
"""Faults that explain an error."""
MAY_FAIL: Final = {
    "sequence_changed": ("export_sequence", "import_sequence", "hand_over"),
    "part_mismatch": ("export_sequence", "import_sequence", "hand_over"),
    "digest_mismatch": ("export_sequence", "import_sequence", "hand_over"),
    "import_exists": ("export_sequence", "import_sequence", "hand_over"),
    "unknown_import": ("import_sequence", "cancel_import"),
    "key_mismatch": ("commit",),
    "invalid_request": (
        *("prefill", "commit", "hand_over"),  # others may have cut it meanwhile
        *("import_sequence", "export_sequence"),
    ),
}
"""Operations to which an error may come whatever the model holds."""
FOREVER: Final = float("inf")
DEADLINE_S: Final = ServerSettings().deadline_s
"""Of calls that give none."""


@dataclass(slots=True)
class Life:
    """How long a sequence stays, and how many of its tokens are in named pages."""

    touched: float
    ttl_s: float = FOREVER
    committed: int = 0


@dataclass(slots=True)
class Mark:
    """A sequence that moves to another engine."""

    for_s: float
    since: float
    is_handed: bool = False

    def is_over(self, now: float) -> bool:
        return now >= self.since + self.for_s


@dataclass(slots=True)
class Namespace:
    """What one tenant sees."""

    name: str
    sequences: Sequences = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], float, float]] = field(default_factory=dict)
    """Rows that each lease holds, until when it certainly does, and until when it may."""
    keys: dict[str, list[int]] = field(default_factory=dict)
    """Rows up to the page of each key."""
    pins: set[str] = field(default_factory=set)
    """Keys of hard pins."""
    max_pages: int | None = None
    reserved: int = 0
    most_used: int = 0
    """Pages in use when `max_pages` was set."""
    imports: dict[str, int] = field(default_factory=dict)
    """Pages of unfinished imports."""

    def may_have_ended(self, name: str, now: float) -> bool:
        """Whether a 404 is right."""
        if name not in self.sequences:
            return True
        life, mark = self.lives[name], self.marks.get(name)
        is_left = mark is not None and mark.is_handed and mark.is_over(now)
        return is_left or now >= life.touched + life.ttl_s

    def drop(self, name: str) -> None:
        for every in (self.sequences, self.lives, self.marks):
            every.pop(name, None)


class Model:
    """One engine's state. `apply` takes the answers in the engine's order."""

    def __init__(self, geometry: PoolGeometry, faults: list[str]) -> None:
        self.geometry = geometry
        self.rows = Rows(geometry)
        self.spaces: dict[str, Namespace] = {}
        self.outstanding: set[Op] = set()
        self.is_draining = False
        """Whether the engine takes no more calls: it drains, or its device is lost."""
        self._faults = faults

    def space(self, name: str) -> Namespace:
        return self.spaces.setdefault(name, Namespace(name))

    def clear(self) -> None:
        """The engine died with all of it."""
        for name, space in self.spaces.items():
            space.__init__(name)  # type: ignore[misc]
        self.outstanding.clear()
        self.is_draining = False

    # Answers.

    def apply(self, op: Op, code: str, fields: dict[str, Any], tensors: Any, now: float) -> None:
        """The engine answered `op` with `code` ("ok": with these fields and tensors)."""
        self.outstanding.discard(op)
        space: Namespace = op.space
        if code != "ok":
            right = self._is_explained(space, op, code, fields, now)
            check(right, f"{op.name} was refused with {code}:", fields.get("detail"), op.fields)
            return
        op.answer = fields, tensors
        for other in self.outstanding:
            check(not op.must_follow(other), f"{op.name} overtook {other.name}:", op.fields)
        for name in {*op.ids, *op.parents} - {*op.made}:
            self._use(space, op, name, now)
        if op.name != "import_sequence" or fields["state"] == "done":
            self._change(space, op, now)
        handler: Callable[..., None] | None = getattr(self, f"_{op.name}", None)
        if handler is not None:
            handler(space, op, fields, now)

    def _use(self, space: Namespace, op: Op, name: str, now: float) -> None:
        """The engine says that a sequence is there."""
        check(name in space.sequences, f"{op.name} found", name, "which is not there")
        mark = space.marks.get(name)
        if mark is not None and op.name not in ("export_sequence", "hand_over"):
            check(not mark.is_handed, f"{op.name} of a handed sequence", name)
            check(mark.is_over(now), f"{op.name} of a leaving sequence", name)
            del space.marks[name]
        elif mark is not None and not mark.is_over(now):  # else it may have expired before
            mark.since = op.sent
        life = space.lives[name]
        life.touched = max(life.touched, op.sent)

    def _change(self, space: Namespace, op: Op, now: float) -> None:
        """The rows of its sequences, and those that it makes or deletes."""
        for step in op.steps:
            name, size = step.name, self.geometry.page_size
            if op.made and name in space.sequences and space.may_have_ended(name, now):
                space.drop(name)
            outcome = step.apply(space.sequences, 0)
            check(outcome[0] == "ok", f"{op.name} was answered, not refused:", outcome, op.fields)
            if name not in space.sequences:
                space.drop(name)
                continue
            rows = outcome[1]
            check(step.is_right(rows, self.rows), "a wrong answer:", step.text, rows, op.answer)
            if op.made:
                new = op.new[step.at] if op.new else op.plan
                space.marks.pop(name, None)
                space.lives[name] = Life(op.sent, new.get("ttl_s", FOREVER))
            life = space.lives[name]
            kept = op.fields["length"] if op.name == "truncate" else min(map(len, rows))
            life.committed = min(life.committed, kept // size * size)
            op.seen = rows

    def _is_explained(
        self, space: Namespace, op: Op, code: str, problem: dict[str, Any], now: float
    ) -> bool:
        """Whether an error is right in the present state."""
        if op.name in MAY_FAIL.get(code, ()) or FAULT_OF.get(code, set()) & set(
            self._faults[op.faults :]
        ):
            return True
        names = [*op.ids, *op.parents]
        match code:
            case "cancelled":
                return op.is_cancelled
            case "deadline_exceeded":
                return now >= op.sent + (op.deadline_s or DEADLINE_S)
            case "not_ready":
                return self.is_draining
            case "unknown_sequence":
                some = problem.get("ids") or ()
                ended = {name for name in (*names, *some) if space.may_have_ended(name, now)}
                return bool(ended) and ended.issuperset(some)
            case "sequence_exists":
                return any(name in space.sequences or name in space.imports for name in op.made)
            case "sequence_moving":
                moving = any(name in space.marks for name in (*names, *op.written))
                return op.name == "delete_sequences" or moving
            case "out_of_pages":
                return self._may_be_full(op)
            case "unknown_lease":
                lease = space.leases.get(op.fields["id"])
                return lease is None or now >= lease[1]
            case "unknown_page":
                key = op.fields["page_key"]
                if op.name == "unpin" or key not in space.keys:  # of an engine that has ended
                    return key not in space.pins
                return self._least_cached(space, space.keys[key], now) < len(space.keys[key])
            case "invalid_request" if op.name == "set_namespace":
                others = sum(one.reserved for one in self.spaces.values() if one is not space)
                return bool(others + op.fields["reserved_pages"] > self.geometry.num_pages)
            case "invalid_request" | "length_mismatch":
                wrong = [step.apply(dict(space.sequences), 0) for step in op.steps]
                return any(code in one or "unknown_sequence" in one for one in wrong)
        return False

    def _pages(self, rows: Sequence[int]) -> int:
        return -(-len(rows) // self.geometry.page_size)

    def _may_be_full(self, op: Op) -> bool:
        """Whether pool or quota could be full if nothing shared a page with anything."""
        own, used = op.space, dict.fromkeys(self.spaces, 0)
        for one in (*self.outstanding, op):
            used[one.space.name] += self._need(one)
        for name, space in self.spaces.items():
            held = [max(one.rows, key=len) for one in space.sequences.values()]
            held += [rows for rows, *_ in space.leases.values()]
            held += [space.keys[key] for key in space.pins]
            used[name] += sum(map(self._pages, held)) + sum(space.imports.values())
        if own.max_pages is not None and used[own.name] > own.max_pages:
            return True
        kept = [
            max(used[name], space.reserved if space is not own else 0)
            for name, space in self.spaces.items()
        ]
        return sum(kept) > self.geometry.num_pages

    def _need(self, op: Op) -> int:
        """Pages that a call may take for some time, at most."""
        every = [one for space in self.spaces.values() for one in space.sequences.values()]
        longest = max((self._pages(rows) for one in every for rows in one.rows), default=0) + 2
        if op.rows:
            return sum(self._pages(rows) + 1 for rows in op.rows)
        if op.name in ("truncate", "import_sequence", "commit"):
            return longest
        return longest * len(op.new)

    # What operations do beside that.

    def _create_sequences(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        for new, made in zip(op.new, fields["sequences"], strict=True):
            if "prefix" in new:
                cached, least = made["cached_len"], self._least_cached(space, op.plan, now)
                check(cached % self.geometry.page_size == 0, "cached_len", cached)
                check(cached >= least, "held pages were not found:", cached, least)

    def _least_cached(self, space: Namespace, wanted: Sequence[int], now: float) -> int:
        """Tokens of a prompt that are certainly cached: leased, or of a committed sequence."""
        held: list[Sequence[int]] = [rows for rows, ends, _ in space.leases.values() if now < ends]
        held += [space.keys[key] for key in space.pins]
        for name, one in space.sequences.items():
            if not space.may_have_ended(name, now):
                held.append(one.rows[0][: space.lives[name].committed])
        size = self.geometry.page_size
        return max((shared(rows, wanted) // size * size for rows in held), default=0)

    def _delete_sequences(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        names = [name for name in space.sequences if name.startswith(op.fields["prefix"])]
        certain = [name for name in names if not space.may_have_ended(name, now)]
        skipped = fields.get("skipped") or ()
        count = fields["num_deleted"] + len(skipped)
        right = len(certain) <= count <= len(names) + len(space.imports)
        check(right, "deleted", fields, "of", names)
        for name in set(names) - set(skipped):
            space.drop(name)

    def _list_sequences(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        found = {one["id"] for one in fields["sequences"]}
        certain = {name for name in space.sequences if not space.may_have_ended(name, now)}
        check(certain <= found, "sequences are not listed:", certain - found)
        making = {name for one in self.outstanding if one.space is space for name in one.made}
        extra = found - space.sequences.keys() - making
        check(not extra, "listed sequences that are not there:", sorted(extra))

    def _pool(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        check(fields["integrity"] == "ok", "integrity", fields)

    def _import_sequence(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        if fields["state"] == "done":
            space.imports.pop(op.fields["id"], None)
        else:
            space.imports[op.fields["id"]] = self._pages(max(op.plan["rows"], key=len))

    def _cancel_import(self, space: Namespace, op: Op, *_: Any) -> None:
        space.imports.pop(op.fields["id"], None)

    def _hand_over(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        (name,), state = op.ids, op.fields["state"]
        mark = space.marks.get(name)
        if state == "leaving":
            is_over = mark is None or (not mark.is_handed and mark.is_over(now))
            check(is_over, "left twice:", name)
        else:
            check(mark is not None, f"{state} without leaving:", name)
        if state == "gone":
            space.drop(name)
        elif state == "back":
            del space.marks[name]
        else:
            space.marks[name] = Mark(op.fields["for_s"], op.sent, state == "handed")

    def _commit(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        rows, life = space.sequences[op.ids[0]].rows, space.lives[op.ids[0]]
        names, count = self.rows.after(0, op.fields["token_ids"]), fields["committed_len"]
        if names != list(rows[0][: len(names)]):
            raise RuntimeError("a program named pages by tokens that are not theirs")
        size = self.geometry.page_size
        most = min(len(names), *map(len, rows)) // size * size
        check(count <= most, "committed_len", fields, most)
        life.committed = max(life.committed, count)
        if fields["last_key"] is not None:
            old = space.keys.setdefault(fields["last_key"], names[:count])
            check(old == names[:count], "one key for two contents:", fields["last_key"])

    def _match_prefix(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        least = self._least_cached(space, op.plan, now)
        check(fields["matched_len"] >= least, "held pages were not matched", fields, least)
        if fields["lease"] is not None:
            rows, lasts = op.plan[: fields["matched_len"]], op.fields["lease_s"]
            space.leases[fields["lease"]["id"]] = rows, op.sent + lasts, now + lasts

    def _release_lease(self, space: Namespace, op: Op, *_: Any) -> list[int]:
        """The rows of a lease that the engine says is there."""
        check(op.fields["id"] in space.leases, f"{op.name} of a lease that is over:", op.fields)
        rows, _, until = space.leases.pop(op.fields["id"])
        check(op.sent < until, f"{op.name} of an expired lease:", op.fields, until)
        return rows

    def _renew_lease(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        rows, lasts = self._release_lease(space, op), op.fields["lease_s"]
        space.leases[op.fields["id"]] = rows, op.sent + lasts, now + lasts

    def _pin(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        key = op.fields["page_key"]
        check(fields["num_pages"] == self._pages(space.keys[key]), "pinned", fields)
        if op.fields["hard"]:
            space.pins.add(key)

    def _unpin(self, space: Namespace, op: Op, *_: Any) -> None:
        space.pins.discard(op.fields["page_key"])

    def _holds(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        found = {one["lease"] for one in fields["holds"]} - {None}
        certain = {name for name, (_, until, _) in space.leases.items() if now < until}
        may = {name for name, (*_, until) in space.leases.items() if op.sent < until}
        opening = any(one.name == "match_prefix" for one in self.outstanding)
        check(certain <= found, "a lease is missing:", certain - found)
        check(opening or found <= may, "leases that are over:", found - may)
        pins = {one["page_key"] for one in fields["holds"] if one["lease"] is None}
        check(pins == space.pins, "hard pins", pins, space.pins)

    def _set_namespace(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        space.max_pages, space.reserved = op.fields["max_pages"], op.fields["reserved_pages"]
        space.most_used = fields["used"]
        self._faults.append("quota changes")
        self._get_namespace(space, op, fields, now)

    def _get_namespace(self, space: Namespace, op: Op, fields: Any, now: float) -> None:
        quota = fields["max_pages"], fields["reserved_pages"]
        check(quota == (space.max_pages, space.reserved), "quota", fields, space.max_pages)
        if space.max_pages is not None:
            most = max(space.max_pages, space.most_used)
            check(fields["used"] <= most, "more pages than the quota:", fields, most)


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
