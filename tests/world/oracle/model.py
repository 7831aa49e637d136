"""The oracle of one engine: names, leases, imports and quotas after each of its answers.

The model takes the answers in the order of the engine, and says whether each was allowed. What
calls do with the rows of sequences is in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, Final

from config.settings import ServerSettings
from kernels.backend import PoolGeometry
from service.engine.store.store import Store
from tests.world.network import NEVER, Clock
from tests.world.oracle.calls import (
    CUTTING,
    SPACES,
    Op,
    Rows,
    Sequences,
    Step,
    check,
    is_right_of_several,
)
from tests.world.tiers import TierPlan

FAULT_OF: Final = {  # faults that explain an error
    "cancelled": {"connection breaks", "a key is revoked"},
    "internal": {"kernel fails", "launch fails"},
    "overloaded": {"no memory"},
    "invalid_request": {"unsupported"},
    "out_of_pages": {"quota changes"},
}
MOVING: Final = ("export_sequence", "import_sequence")
MAY_FAIL: Final = {  # operations to which an error may come whatever the model holds
    "sequence_changed": MOVING,
    "part_mismatch": MOVING,
    "digest_mismatch": MOVING,
    "import_exists": MOVING,
    "unknown_import": ("import_sequence", "cancel_import", "get_import"),
    "key_mismatch": ("commit", "commit_sequences"),
    # others may have cut it meanwhile, or aborted a step of the lane
    "invalid_request": (*MOVING, "prefill", "commit", "commit_sequences", "step", "cascade"),
}
DEADLINE_S: Final = ServerSettings().deadline_s  # of calls that give none


@dataclass(slots=True)
class Life:
    """How long a sequence stays, how many of its tokens are in named pages, and the length up to
    which it has a reserve."""

    touched: float
    ttl_s: float = NEVER
    committed: int = 0
    reserved: int = 0
    has_chain: bool = False


class Namespace:
    """What one tenant has at the engine."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.forget()
        self.clear()

    def forget(self) -> None:
        """Nothing is on disk."""
        self.keys: dict[str, list[int]] = {}  # rows up to the page of each key
        self.pins: set[str] = set()  # keys of hard pins
        self.earlier_pins: set[str] = set()  # of engines before, as far as they may be loaded yet,
        self.sure_pins: set[str] = set()  # and those that must be
        self.unpinned: set[str] = set()  # since what is on disk was certain: a kill may undo it
        self.named: dict[int, Life | None] = {}  # rows of pages that were named, since ever, with
        # the sequence that named them, None for several
        self.durable: list[list[int]] = []  # rows of pages that are on disk
        self.max_pages: int | None = None
        self.reserved = 0
        self.quotas: set[tuple[int | None, int]] = {(None, 0)}  # since the engine's start

    def clear(self) -> None:
        """The engine has died with all that was not on disk."""
        self.held: Sequences = {}
        self.lives: dict[str, Life] = {}
        self.leases: dict[str, tuple[list[int], float, float]] = {}
        """Rows that each lease holds, until when it certainly does, and until when it may."""
        self.most_used = 0  # when `max_pages` was set
        self.imports: dict[str, int] = {}  # pages of unfinished ones

    def may_have_ended(self, name: str) -> bool:
        """Whether a 404 is right."""
        if name not in self.held:
            return True
        life = self.lives[name]
        return self.clock.now >= life.touched + life.ttl_s

    def certain(self) -> set[str]:
        """Sequences that are there."""
        return {name for name in self.held if not self.may_have_ended(name)}

    def name_rows(self, op: Op, rows: Iterable[int]) -> None:
        """A call has named pages of these rows, or may have."""
        life = self.lives.get(op.ids[0]) if len(op.ids) == 1 else None
        for row in rows:
            self.named[row] = life if self.named.get(row, life) is life else None

    def drop(self, name: str) -> None:
        for every in (self.held, self.lives):
            every.pop(name, None)


class Model:
    """One engine's state. `apply` takes the answers in the engine's order."""

    def __init__(
        self, geometry: PoolGeometry, clock: Clock, faults: list[str], tiers: TierPlan
    ) -> None:
        self.geometry, self.clock, self.faults, self.tiers = geometry, clock, faults, tiers
        self.rows = Rows(geometry)
        self.spaces = {name: Namespace(name, clock) for name in SPACES}
        self.outstanding: set[Op] = set()
        self.store: Store | None = None

    def begin(self, store: Store) -> None:
        """A new engine has a store with the quotas that the one before had, or had before."""
        for name, space in self.spaces.items():
            held = store.tree.budget.look(name)
            quota = held.max_pages, held.reserved_pages
            check(quota in space.quotas, "a quota that was not set:", name, quota, space.quotas)
            space.max_pages, space.reserved = quota
            space.quotas = {quota, (None, 0)}
        self.store = store
        self.is_emptied = False  # takes no new sequences
        self.is_draining = False  # whether it takes no more calls, also as its device is lost

    def clear(self, is_graceful: bool) -> None:
        """The engine has ended, or died."""
        tiers = self.tiers
        is_sure = is_graceful and tiers.is_honest
        for space in self.spaces.values():
            calls = [op for op in self.outstanding if op.space is space]
            if not tiers.has_disk:
                space.forget()
            elif is_sure and not calls:
                space.quotas = {(space.max_pages, space.reserved)}
            space.quotas |= {quota_of(op) for op in calls if op.name == "set_namespace"}
            for op in calls:
                space.name_rows(op, self._names_of(op))
            pinning = {op.fields["page_key"] for op in calls if op.name in ("pin", "unpin")}
            keeps = is_sure and tiers.is_roomy
            space.sure_pins = (space.pins | space.sure_pins) - pinning if keeps else set()
            space.unpinned = set() if is_sure else space.unpinned
            space.earlier_pins |= space.pins | pinning | space.unpinned
            space.pins = set()
            space.clear()
        self.outstanding = set()
        self.store = None

    @property
    def is_restoring(self) -> bool:
        """Whether pins of earlier engines may not be loaded yet."""
        loading = None if self.store is None else self.store.loading
        return loading is not None and loading._restoring is not None

    def look_at_pins(self) -> None:
        """Pins of earlier engines are loaded, or given up."""
        if self.store is None or self.is_restoring:
            return
        for name, space in self.spaces.items():
            if not space.earlier_pins:
                continue
            found = {key.hex() for _, key in self.store.tree.budget.look(name).pins}
            calls = (op for op in self.outstanding if op.space is space and op.name == "unpin")
            lost = space.sure_pins - found - {op.fields["page_key"] for op in calls}
            check(not lost, "hard pins are lost:", lost)
            space.pins |= found & space.earlier_pins
            space.earlier_pins, space.sure_pins = set(), set()

    def apply(self, op: Op, code: str, fields: dict[str, Any], tensors: Any) -> None:
        """The engine answered `op` with `code` ("ok": with these fields and tensors)."""
        self.outstanding.discard(op)
        space: Namespace = op.space
        if code in ("cancelled", "deadline_exceeded", "not_ready") or "token_ids" in op.fields:
            space.name_rows(op, self._names_of(op))
        if op.name in CUTTING:  # pages that it named may stay without it
            lives = [space.lives[name] for name in op.ids if name in space.lives]
            space.named |= {row: None for row, one in space.named.items() if one in lives}
        if code != "ok":
            right = self._is_explained(space, op, code, fields)
            check(right, f"{op.name} was refused with {code}:", fields.get("detail"), op.fields)
            return
        op.answer = fields, tensors
        for other in self.outstanding:
            check(not op.must_follow(other), f"{op.name} overtook {other.name}:", op.fields)
        for name in {*op.ids, *op.parents} - {*op.made}:
            self._use(space, op, name)
        if op.name != "import_sequence" or fields["state"] == "done":
            for step in op.steps:
                self._change(space, step)
        self._look(space, op, fields)
        self._hold(space, op, fields)

    def _use(self, space: Namespace, op: Op, name: str) -> None:
        """The engine says that a sequence is there."""
        check(name in space.held, f"{op.name} found", name, "which is not there")
        life = space.lives[name]
        life.touched = max(life.touched, op.sent)

    def _change(self, space: Namespace, step: Step) -> None:
        """The rows of a sequence; it may be new, or be deleted."""
        op, name, size = step.op, step.name, self.geometry.page_size
        if op.made and name in space.held and space.may_have_ended(name):
            space.drop(name)
        outcome = step.apply(space.held, 0)
        check(outcome[0] == "ok", f"{op.name} was answered, not refused:", outcome, op.fields)
        if name not in space.held:
            space.drop(name)
            return
        op.seen = rows = outcome[1]
        check(step.is_right(rows, self.rows), "a wrong answer:", step.text, rows, op.answer)
        if op.made:
            new = op.new[step.at] if op.new else op.plan
            end = len(rows[0]) + new["reserve"] if new.get("reserve") else 0
            ttl_s, chained = new.get("ttl_s") or NEVER, "prefix" in new
            space.lives[name] = Life(op.sent, ttl_s, 0, end, chained)
        life = space.lives[name]
        if "token_ids" in op.fields and op.name in ("append", "prefill", "truncate"):
            known, end = view_of(step)["known_len"], len(rows[op.layers[0]])
            known = known if op.name == "truncate" else known[step.at]
            check(known == end, "known_len:", step.text, known, end)
        if op.name in CUTTING:
            view = view_of(step)
            check(view["reserved_len"] <= life.reserved, "a cut made a reserve:", step.text, view)
            life.reserved = view["reserved_len"]
        kept = step.cut[0] if op.name in CUTTING else min(map(len, rows))
        life.committed = min(life.committed, kept // size * size)
        if op.name in ("get_sequence", *CUTTING):
            self._check_committed(space, step, view_of(step), rows)

    def _check_committed(
        self, space: Namespace, step: Step, view: dict[str, Any], rows: Sequence[Sequence[int]]
    ) -> None:
        """Committed tokens are in pages that every layer has, and that were named."""
        count, life = view["committed_len"], space.lives[step.name]
        whole = min(map(len, rows)) // self.geometry.page_size * self.geometry.page_size
        check(life.committed <= count <= whole, "committed_len:", step.text, count, life.committed)
        check({some[:count] for some in rows} == {rows[0][:count]}, "named too early:", step.text)
        self._check_named(space, list(rows[0][:count]))
        life.committed = count
        size, writing = (
            self.geometry.page_size,
            {name for op in self.outstanding for name in op.written},
        )
        if (
            life.has_chain
            and step.name not in writing
            and count < whole
            and count + size <= view["known_len"]
        ):
            page = rows[0][count : count + size]
            is_equal = any(space.named.get(row, life) is not life for row in page)
            check(is_equal, "a page without its name:", step.text, view)

    def _is_explained(self, space: Namespace, op: Op, code: str, problem: dict[str, Any]) -> bool:
        """Whether an error is right in the present state."""
        if code == "out_of_pages" and self._is_reserved(space, op):
            return False
        faults = FAULT_OF.get(code, set()) & set(self.faults[op.faults :])
        if faults or op.name in MAY_FAIL.get(code, ()):
            return True
        names = [*op.ids, *op.parents]
        match code:
            case "cancelled":  # also with a step before it on its lane
                return op.is_cancelled or op.name == "step"
            case "internal" if op.name == "step":
                return not {"no memory", "unsupported"}.isdisjoint(self.faults[op.faults :])
            case "deadline_exceeded":
                return self.clock.now >= op.sent + (op.deadline_s or DEADLINE_S)
            case "not_ready":
                return self.is_draining or (self.is_emptied and bool(op.made or op.name == "pin"))
            case "not_erased":  # a disk that has failed is off until the next start
                return not self.tiers.is_honest
            case "unknown_sequence":
                some = problem.get("ids") or ()
                ended = {name for name in (*names, *some) if space.may_have_ended(name)}
                return bool(ended) and ended.issuperset(some)
            case "sequence_exists":
                return any(name in space.held or name in space.imports for name in op.made)
            case "out_of_pages":
                return self._may_be_full(op)
            case "unknown_lease":
                lease = space.leases.get(op.fields["id"])
                return lease is None or self.clock.now >= lease[1]
            case "unknown_page":
                key = op.fields["page_key"]
                if op.name == "unpin" or key not in space.keys:  # of an engine that has ended
                    return key not in space.pins
                return self._least_cached(space, space.keys[key]) < len(space.keys[key])
            case "invalid_request" if op.name == "set_namespace":
                others = sum(one.reserved for one in self.spaces.values() if one is not space)
                return bool(others + op.fields["reserved_pages"] > self.geometry.num_pages)
            case "invalid_request" if op.name == "truncate" and "layer" in op.fields:
                return True  # not within shared pages
            case "invalid_request" | "length_mismatch":
                wrong = [step.apply(dict(space.held), 0) for step in op.steps]
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
            for at, one in space.held.items():
                end = max(space.lives[at].reserved, *map(len, one.rows))
                used[name] += -(-end // self.geometry.page_size)
            held: list[Sequence[int]] = []
            held += [rows for rows, *_ in space.leases.values()]
            held += [space.keys[key] for key in space.pins | space.earlier_pins]
            used[name] += sum(map(self._pages, held)) + sum(space.imports.values())
        if own.max_pages is not None and used[own.name] > own.max_pages:
            return True
        others = (one for one in self.spaces.values() if one is not own)
        kept = sum(max(used[one.name], one.reserved) for one in others)
        return bool(used[own.name] + kept > self.geometry.num_pages)

    def _is_reserved(self, space: Namespace, op: Op) -> bool:
        """Whether the rows that a call brings are within the reserves of its sequences, which no
        other call that is under way may have changed."""
        others = {name for one in self.outstanding for name in one.written}
        return bool(op.rows) and all(
            name in space.certain() - others
            and len(space.held[name].rows[layer]) + len(rows) <= space.lives[name].reserved
            for name, rows in zip(op.ids, op.rows, strict=True)
            for layer in op.layers
        )

    def _need(self, op: Op) -> int:
        """Pages that a call may take for some time, at most."""
        if op.rows:
            return sum(self._pages(rows) + 1 for rows in op.rows)
        reserves = sum(-(-new.get("reserve", 0) // self.geometry.page_size) for new in op.new)
        if self.tiers.has_any and op.name in ("match_prefix", "create_sequences") and op.plan:
            return self._pages(op.plan) + reserves
        every = [one.rows for space in self.spaces.values() for one in space.held.values()]
        longest = max((self._pages(rows) for some in every for rows in some), default=0) + 2
        num_cut = len(op.ids) if op.name in CUTTING else op.name in ("import_sequence", "commit")
        return longest * (num_cut or len(op.new)) + reserves

    def _least_cached(self, space: Namespace, wanted: Sequence[int]) -> int:
        """Tokens of a prompt that are certainly cached: leased, or of a committed sequence."""
        leases, size = space.leases.values(), self.geometry.page_size
        held: list[Sequence[int]] = [rows for rows, until, _ in leases if self.clock.now < until]
        held += [space.keys[key] for key in space.pins]
        held += [space.held[one].rows[0][: space.lives[one].committed] for one in space.certain()]
        # the number of a row stands for all rows before it as well
        lengths = [sum(map(eq, rows, wanted)) for rows in held]
        return max(lengths, default=0) // size * size

    def _look(self, space: Namespace, op: Op, fields: Any) -> None:
        """What an answer says of the namespace is right."""
        match op.name:
            case "pool":
                check(fields["integrity"] == "ok", "integrity", fields)
            case "create_sequences" if op.plan is not None:
                (made,), least = fields["sequences"], self._least_cached(space, op.plan)
                cached = made["cached_len"]
                check(cached % self.geometry.page_size == 0, "cached_len", cached)
                check(cached >= least, "held pages were not found:", cached, least)
                self._check_named(space, op.plan[:cached])
            case "ragged_prefill" | "merge" | "cascade":
                check(is_right_of_several(op, self.rows, space.held), "wrong attention:", op.fields)
            case "snapshot":
                states, step = op.answer[1]["page_states"], fields["page_step"]
                is_whole = len(states) == -(-self.geometry.num_pages // step)
                check(is_whole and max(states) <= 3, "a snapshot", fields, states)
            case "engines":
                check([one["name"] for one in fields["engines"]] == ["engine"], "engines", fields)
            case "drain_engine":
                self.is_emptied = not op.fields["stop"]
            case "prefetch":
                self._check_named(space, op.plan[: fields["matched_len"]])
            case "match_prefix":
                self._check_named(space, op.plan[: fields["matched_len"]])
                least, size = self._least_cached(space, op.plan), self.geometry.page_size
                if self.tiers.has_any and op.fields["lease_s"]:
                    least = 0  # a lease holds a part of the pool at most
                elif self.tiers.is_honest and self.tiers.is_roomy:
                    every = [sum(map(eq, rows, op.plan)) for rows in space.durable]
                    least = max([least, *every]) // size * size
                check(fields["matched_len"] >= least, "held pages were not matched", fields, least)
            case "list_sequences":
                found, certain = {one["id"] for one in fields["sequences"]}, space.certain()
                check(certain <= found, "sequences are not listed:", certain - found)
                mine = [one for one in self.outstanding if one.space is space]
                making = {name for one in mine for name in one.made}
                extra = found - space.held.keys() - making
                check(not extra, "listed sequences that are not there:", sorted(extra))
            case "holds":
                found = {one["lease"] for one in fields["holds"]} - {None}
                leases = space.leases.items()
                certain = {name for name, (_, until, _) in leases if self.clock.now < until}
                may = {name for name, (*_, until) in leases if op.sent < until}
                opening = any(one.name == "match_prefix" for one in self.outstanding)
                check(certain <= found, "a lease is missing:", certain - found)
                check(opening or found <= may, "leases that are over:", found - may)
                pins = {one["page_key"] for one in fields["holds"] if one["lease"] is None}
                extra = pins - space.pins - space.earlier_pins
                check(space.pins <= pins and not extra, "hard pins", pins, space.pins)
            case "set_namespace" | "get_namespace":
                if op.name == "set_namespace":
                    space.most_used = fields["used"]
                    space.max_pages = op.fields["max_pages"]
                    space.reserved = op.fields["reserved_pages"]
                    space.quotas.add(quota_of(op))
                    self.faults.append("quota changes")
                quota = fields["max_pages"], fields["reserved_pages"]
                check(quota == (space.max_pages, space.reserved), "quota", fields, space.max_pages)
                most = max(space.max_pages or self.geometry.num_pages, space.most_used)
                check(fields["used"] <= most, "more pages than the quota:", fields, most)

    def _names_of(self, op: Op) -> set[int]:
        """Rows of pages that a commit, or a call with token ids, may name."""
        if "token_ids" in op.fields and op.ids and op.name not in ("commit", "commit_sequences"):
            held = [op.space.held[name].rows for name in op.ids if name in op.space.held]
            return {
                row for one in (*op.rows, *(some for rows in held for some in rows)) for row in one
            }
        if op.name not in ("commit", "commit_sequences"):
            return set()
        every = op.plan or [op.fields["token_ids"]]
        return {row for tokens in every for row in self.rows.after(0, tokens)}

    def _check_named(self, space: Namespace, rows: list[int]) -> None:
        """Rows were found: a commit named their pages that was not refused."""
        maybe = {row for op in self.outstanding for row in self._names_of(op) if op.space is space}
        extra = set(rows) - space.named.keys() - maybe
        check(not extra, "found pages that no commit has named:", rows, extra)

    def _hold(self, space: Namespace, op: Op, fields: Any) -> None:
        """Names, leases and pins that a call makes or ends."""
        name, lease_s = op.fields.get("id"), op.fields.get("lease_s", 0.0)
        until = op.sent + lease_s, self.clock.now + lease_s
        match op.name:
            case "delete_sequences":
                names = {one for one in space.held if one.startswith(op.fields["prefix"])}
                count, least = fields["num_deleted"], len(names & space.certain())
                right = least <= count <= len(names) + len(space.imports)
                check(right, "deleted", fields, "of", names)
                for one in names:
                    space.drop(one)
            case "import_sequence" if fields["state"] != "done":
                space.imports[name] = self._pages(max(op.plan["rows"], key=len))
            case "import_sequence" | "cancel_import":
                space.imports.pop(name, None)
            case "commit":
                count, key = fields["committed_len"], fields["last_key"]
                self._commit(space, op.ids[0], op.fields["token_ids"], count, key)
                names = self.rows.after(0, op.fields["token_ids"])
                space.durable += [names[:count]] * bool(fields.get("durable"))
            case "commit_sequences":
                for step, tokens, *found in zip(
                    op.steps, op.plan, fields["committed_lens"], fields["last_keys"], strict=True
                ):
                    self._commit(space, step.name, tokens, *found)
            case "match_prefix" if fields["lease"] is not None:
                space.leases[fields["lease"]["id"]] = op.plan[: fields["matched_len"]], *until
            case "release_lease" | "renew_lease":
                check(name in space.leases, f"{op.name} of a lease that is over:", op.fields)
                rows, _, ends = space.leases.pop(name)
                check(op.sent < ends, f"{op.name} of an expired lease:", op.fields, ends)
                if op.name == "renew_lease":
                    space.leases[name] = rows, *until
            case "pin":
                key = op.fields["page_key"]
                check(fields["num_pages"] == self._pages(space.keys[key]), "pinned", fields)
                space.pins |= {key} if op.fields["hard"] else set()
            case "unpin":
                for pins in (space.pins, space.earlier_pins, space.sure_pins):
                    pins.discard(op.fields["page_key"])
                space.unpinned.add(op.fields["page_key"])
            case "clear" | "evict":
                space.durable = []

    def _commit(
        self, space: Namespace, name: str, tokens: list[int], count: int, key: str | None
    ) -> None:
        rows, life = space.held[name].rows, space.lives[name]
        names = self.rows.after(0, tokens)
        if names != list(rows[0][: len(names)]):
            raise RuntimeError("a program named pages by tokens that are not theirs")
        size = self.geometry.page_size
        most = min(len(names), *map(len, rows)) // size * size
        check(count <= most, "committed_len", name, count, most)
        life.committed = max(life.committed, count)
        for row in names[:count]:
            space.named[row] = life if space.named.get(row, life) is life else None
        if key is not None:
            old = space.keys.setdefault(key, names[:count])
            check(old == names[:count], "one key for two contents:", key)


def view_of(step: Step) -> dict[str, Any]:
    """What an answer says of a sequence."""
    fields: dict[str, Any] = step.op.answer[0] if step.op.answer else {}
    return fields["sequences"][step.at] if "sequences" in fields else fields


def quota_of(op: Op) -> tuple[int | None, int]:
    """The quota that a call sets."""
    return op.fields["max_pages"], op.fields["reserved_pages"]
