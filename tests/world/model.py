"""The oracle: sequences, names, marks, leases and imports as lists of numbers, and dense attention.

The engine answers calls in some order; the model takes them in that order, says whether each answer
was allowed, and what its tensors must be. A row of K and V is a number: the token and all before it
make its content, as in a model's cache. `Wrong` is a bug of the service, or of this page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kernels.backend import PoolGeometry

TOLERANCE: Final = 2e-4
FAULT_OF: Final = {
    "internal": ("kernel fails", "launch fails"),
    "overloaded": ("no memory",),
    "invalid_request": ("unsupported",),
    "out_of_pages": ("quota changes",),
}
"""Faults that explain an error."""
OF_NO_SEQUENCE: Final = ("release_lease", "renew_lease", "get_namespace", "set_namespace")
READING: Final = ("decode", "prefill", "gather", "get_sequence", "page_table", "export_sequence")
"""Operations that change no sequence, unless they bring rows."""


class Wrong(AssertionError):
    """The service did what the model rules out."""


def check(holds: object, text: str, *values: object) -> None:
    if not holds:
        raise Wrong(" ".join([text, *map(repr, values)]))


class Rows:
    """The numbers of rows: a tree by token."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry
        self._children: dict[tuple[int, int], int] = {}
        self.parents, self.tokens = [-1], [-1]

    def after(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """Rows of tokens behind a row; 0 is before the first."""
        made = []
        for token in tokens:
            row = self._children.setdefault((parent, token), len(self.parents))
            if row == len(self.parents):
                self.parents.append(parent)
                self.tokens.append(token)
            made.append(row)
            parent = row
        return made

    def content(self, rows: Sequence[int], layer: int) -> tuple[Any, Any]:
        """k and v [n, Hkv, D] of rows."""
        heads, dim = self._geometry.num_kv_heads, self._geometry.head_dim
        at = np.asarray(rows, np.float64).reshape(-1, 1, 1, 1)
        place = np.arange(2 * heads * dim, dtype=np.float64).reshape(2, heads, dim)
        values = np.sin(at * 12.9898 + place * 78.233 + layer * 3.7) * 2
        return values[:, 0].astype(np.float32), values[:, 1].astype(np.float32)

    def is_chain(self, rows: Sequence[int]) -> bool:
        """Whether each row's content belongs behind the row before it."""
        return all(
            self.parents[row] == before for before, row in zip([0, *rows[:-1]], rows, strict=True)
        )


@dataclass(slots=True)
class Sequence_:
    """One sequence: its rows at every layer."""

    rows: list[list[int]]
    touched: float
    ttl_s: float = float("inf")
    committed: int = 0
    """Tokens in named pages."""

    @property
    def length(self) -> int:
        return min(map(len, self.rows))

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    def may_be_gone(self, now: float) -> bool:
        return now >= self.touched + self.ttl_s


@dataclass(slots=True)
class Mark:
    """A sequence that moves to another engine."""

    for_s: float
    since: float
    is_handed: bool = False


@dataclass(slots=True, eq=False)
class Op:
    """A call. `rows` are those that it appends, `plan` what else the model needs to know."""

    name: str
    fields: dict[str, Any]
    tensors: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)
    plan: Any = None
    deadline_s: float = 0.0
    sent: float = 0.0
    is_cancelled: bool = False
    is_lost: bool = False
    """Whether its caller lost the connection."""
    faults: int = 0
    """Length of the log of faults when it was sent."""
    space: Namespace | None = None
    session: int = 0
    number: int = 0
    """Of the call, in its session."""
    reply: tuple[str, bytes] | None = None
    """Code and image, as the engine answered."""

    @property
    def ids(self) -> list[str]:
        """Ids of the sequences that must be there."""
        if self.name in OF_NO_SEQUENCE:
            return []
        if "sequences" in self.fields and self.name != "create_sequences":
            return list(self.fields["sequences"])
        return [self.fields["id"]] if "id" in self.fields else []

    @property
    def new(self) -> list[dict[str, Any]]:
        return self.fields["sequences"] if self.name == "create_sequences" else []

    @property
    def written(self) -> set[str]:
        """Sequences that it changes, as far as it names them."""
        is_reading = self.name in READING and not self.rows
        return {new["id"] for new in self.new} | set(() if is_reading else self.ids)

    def must_follow(self, other: Op) -> bool:
        """Whether it takes effect after `other`: a later call of the same session on a sequence."""
        if self.session != other.session or self.number < other.number or other.is_cancelled:
            return False
        names, others = (
            {*one.ids, *(new["parent"] for new in one.new if "parent" in new), *one.written}
            for one in (self, other)
        )
        return not (self.written.isdisjoint(others) and other.written.isdisjoint(names))


@dataclass(slots=True)
class Namespace:
    """What one tenant sees."""

    name: str
    sequences: dict[str, Sequence_] = field(default_factory=dict)
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
    imports: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Pages of unfinished imports, and when they were last used."""


class Model:
    """One engine's state. `apply` takes the answers in the engine's order."""

    def __init__(self, geometry: PoolGeometry, faults: list[str]) -> None:
        self.geometry = geometry
        self.rows = Rows(geometry)
        self.spaces: dict[str, Namespace] = {}
        self.outstanding: set[Op] = set()
        self.is_draining = False
        """Whether the engine takes no more calls: it drains, or its device is lost."""
        self.num_checked = 0
        self._faults = faults

    def space(self, name: str) -> Namespace:
        return self.spaces.setdefault(name, Namespace(name))

    def clear(self) -> None:
        """The engine died: all is gone."""
        for name, space in self.spaces.items():
            space.__init__(name)  # type: ignore[misc]
        self.outstanding.clear()
        self.is_draining = False

    # Answers.

    def apply(self, op: Op, code: str, fields: dict[str, Any], tensors: Any, now: float) -> None:
        """The engine answered `op` with `code` ("ok": with these fields and tensors)."""
        self.outstanding.discard(op)
        self.num_checked += 1
        space = op.space
        if space is None:
            raise RuntimeError("an operation without a namespace")
        if code != "ok":
            self._check_error(space, op, code, fields, now)
            return
        for other in self.outstanding:
            check(not op.must_follow(other), f"{op.name} overtook {other.name}:", op.fields)
        if op.name not in ("delete_sequences", "import_sequence", "cancel_import"):
            for name in op.ids:
                self._read(space, op, name, now)
        handler: Callable[..., None] = getattr(self, f"_{op.name}")
        handler(space, op, fields, tensors, now)

    def _read(self, space: Namespace, op: Op, name: str, now: float) -> Sequence_:
        """A sequence that the engine says is there."""
        found = space.sequences.get(name)
        check(found is not None, f"{op.name} found", name, "which is not there")
        mark = space.marks.get(name)
        if mark is not None and op.name not in ("export_sequence", "hand_over"):
            check(not mark.is_handed, f"{op.name} of a handed sequence", name)
            check(now >= mark.since + mark.for_s, f"{op.name} of a leaving sequence", name)
            del space.marks[name]
        elif mark is not None and now < mark.since + mark.for_s:  # else it may have expired before
            mark.since = op.sent
        if found is None:
            raise Wrong(name)
        found.touched = max(found.touched, op.sent)
        return found

    def may_be_gone(self, space: Namespace, name: str, now: float) -> bool:
        """Whether a 404 is right."""
        found, mark = space.sequences.get(name), space.marks.get(name)
        if found is None or found.may_be_gone(now):
            return True
        return mark is not None and mark.is_handed and now >= mark.since + mark.for_s

    def _check_error(
        self, space: Namespace, op: Op, code: str, problem: dict[str, Any], now: float
    ) -> None:
        """Raises Wrong unless the error is right in the present state."""
        explained = set(FAULT_OF.get(code, ())) & set(self._faults[op.faults :])
        names = op.ids + [new["parent"] for new in op.new if "parent" in new]
        match code:
            case _ if explained:
                right = True
            case "cancelled":
                right = op.is_cancelled
            case "deadline_exceeded":
                right = op.deadline_s > 0 and now >= op.sent + op.deadline_s
            case "not_ready":
                right = self.is_draining
            case "unknown_sequence":
                right = any(self.may_be_gone(space, name, now) for name in names)
                for name in problem.get("ids", ()):
                    check(
                        self.may_be_gone(space, name, now),
                        f"{op.name}: 404 for a living sequence",
                        name,
                    )
            case "sequence_exists":
                made = [new["id"] for new in op.new] or op.ids
                right = any(name in space.sequences or name in space.imports for name in made)
            case "sequence_moving":
                right = op.name == "delete_sequences" or any(
                    name in space.marks for name in (*names, *op.written)
                )
            case "length_mismatch":
                held = {
                    name: len(space.sequences[name].rows[op.fields.get("layer", 0)])
                    for name in op.ids
                    if name in space.sequences
                }
                right = [held.get(name) for name in op.ids] != op.fields.get("offsets")
            case "invalid_request":
                right = self._is_invalid(space, op)
            case "out_of_pages":
                right = self._may_be_full(op)
            case "sequence_changed" | "part_mismatch" | "digest_mismatch" | "import_exists":
                right = op.name in ("export_sequence", "import_sequence", "hand_over")
            case "unknown_import":
                right = op.name in ("import_sequence", "cancel_import", "get_import")
            case "unknown_lease":
                lease = space.leases.get(op.fields["id"])
                right = lease is None or now >= lease[1]
            case "unknown_page":
                key, rows = op.fields["page_key"], space.keys[op.fields["page_key"]]
                right = key not in space.pins if op.name == "unpin" else True
                right = right and (
                    op.name == "unpin" or self._least_cached(space, rows, now) < len(rows)
                )
            case "key_mismatch":
                right = op.name == "commit"
            case _:
                right = False
        check(right, f"{op.name} was refused with {code}:", problem.get("detail"), op.fields)

    def _is_invalid(self, space: Namespace, op: Op) -> bool:
        found = [space.sequences.get(name) for name in op.ids]
        match op.name:
            case "set_namespace":
                others = sum(one.reserved for one in self.spaces.values() if one is not space)
                return others + op.fields["reserved_pages"] > self.geometry.num_pages
            case "create_sequences":
                return any(
                    new["parent"] not in space.sequences
                    or new.get("length", space.sequences[new["parent"]].longest)
                    > space.sequences[new["parent"]].length
                    for new in op.new
                    if "parent" in new
                )
            case "truncate":
                keep = op.fields.get("keep") or [-1]
                most = max(op.fields["length"], keep[-1] + 1)
                return found[0] is None or most > found[0].length
            case "append":
                return any(one is None or len(set(map(len, one.rows))) > 1 for one in found)
            case "prefill":
                return True  # fewer keys than queries, where another caller cut it meanwhile
            case "commit" | "hand_over" | "import_sequence" | "export_sequence":
                return True
        return False

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.geometry.page_size)

    def _may_be_full(self, op: Op) -> bool:
        """Whether pool or quota could be full if nothing shared a page with anything."""
        used: dict[str, int] = {}
        for one in (*self.outstanding, op):
            if one.space is not None:
                used[one.space.name] = used.get(one.space.name, 0) + self._need(one)
        for name, space in self.spaces.items():
            lengths = [one.longest for one in space.sequences.values()]
            lengths += [len(rows) for rows, *_ in space.leases.values()]
            lengths += [len(space.keys[key]) for key in space.pins]
            used[name] = used.get(name, 0) + sum(map(self._pages, lengths))
            used[name] += sum(pages for pages, _ in space.imports.values())
        own = op.space
        if own is not None and own.max_pages is not None and used[own.name] > own.max_pages:
            return True
        kept = [
            max(count, self.spaces[name].reserved if self.spaces[name] is not own else 0)
            for name, count in used.items()
        ]
        return sum(kept) > self.geometry.num_pages

    def _need(self, op: Op) -> int:
        """Pages that a call may take for some time, at most."""
        every = [one for space in self.spaces.values() for one in space.sequences.values()]
        longest = self._pages(max((one.longest for one in every), default=0)) + 2
        match op.name:
            case "append" | "decode" | "prefill":
                return sum(self._pages(len(rows)) + 1 for rows in op.rows)
            case "create_sequences":
                return longest * len(op.new)
            case "truncate" | "import_sequence" | "commit":
                return longest
        return 0

    # What each operation does.

    def _create_sequences(
        self, space: Namespace, op: Op, fields: dict[str, Any], tensors: Any, now: float
    ) -> None:
        layers = self.geometry.num_layers
        for new, made in zip(op.fields["sequences"], fields["sequences"], strict=True):
            name, old = new["id"], space.sequences.get(new["id"])
            check(old is None or self.may_be_gone(space, name, now), "created twice:", name)
            space.marks.pop(name, None)
            rows: list[int] = []
            if "prefix" in new:
                wanted = self.rows.after(0, new["prefix"]["token_ids"])
                rows = wanted[: made["cached_len"]]
                check(len(rows) % self.geometry.page_size == 0, "cached_len", made["cached_len"])
                least = self._least_cached(space, wanted, now)
                check(len(rows) >= least, "held pages were not found:", made["cached_len"], least)
                every = [list(rows) for _ in range(layers)]
            elif "parent" in new:
                parent = self._read(space, op, new["parent"], now)
                length = new.get("length", parent.length)
                every = [one[:length] for one in parent.rows]
            else:
                every = [[] for _ in range(layers)]
            space.sequences[name] = Sequence_(every, op.sent, new.get("ttl_s", float("inf")))
            check(made["lengths"] == [len(one) for one in every], "lengths", made, every)

    def _least_cached(self, space: Namespace, wanted: list[int], now: float) -> int:
        """Tokens of a prompt that are certainly cached: leased, or of a committed sequence."""
        held = [rows for rows, until, _ in space.leases.values() if now < until]
        held += [space.keys[key] for key in space.pins]
        for name, one in space.sequences.items():
            if one.committed and not self.may_be_gone(space, name, now):
                held.append(one.rows[0][: one.committed])
        size = self.geometry.page_size
        return max((shared(rows, wanted) // size * size for rows in held), default=0)

    def _extend(self, space: Namespace, op: Op, layers: Sequence[int]) -> None:
        for name, rows in zip(op.ids, op.rows, strict=True):
            for layer in layers:
                held = space.sequences[name].rows[layer]
                if (offsets := op.fields.get("offsets")) is not None:
                    check(len(held) == offsets[op.ids.index(name)], "offsets", op.fields, len(held))
                space.sequences[name].rows[layer] = held + rows

    def _append(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        layers = op.fields.get("layers") or [op.fields["layer"]]
        for name in op.ids:
            held = {len(space.sequences[name].rows[layer]) for layer in layers}
            check(len(held) == 1, "an append at layers of different lengths:", name, held)
        self._extend(space, op, layers)
        lengths = [len(space.sequences[name].rows[layers[0]]) for name in op.ids]
        check(fields["lengths"] == lengths, "lengths after an append", fields, lengths)

    def _decode(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        layer = op.fields["layer"]
        if op.rows:
            self._extend(space, op, [layer])
        queries = op.fields.get("qo_indptr") or range(len(op.ids) + 1)
        for b, name in enumerate(op.ids):
            rows = space.sequences[name].rows[layer]
            k, v = self.rows.content(rows, layer)
            count = queries[b + 1] - queries[b]
            for i in range(count):
                at = queries[b] + i
                seen = len(rows) - count + i + 1 if op.fields.get("causal") else len(rows)
                o, lse = attention(op.tensors["q"][at], k[:seen], v[:seen])
                for part, value in (("o", o), ("lse", lse)):
                    close = np.allclose(tensors[part][at], value, atol=TOLERANCE, rtol=TOLERANCE)
                    check(close, f"{part} of", name, at, tensors[part][at].tolist(), value.tolist())

    _prefill = _decode

    def _gather(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        layer, begin = op.fields["layer"], op.fields.get("start", 0)
        rows = [space.sequences[name].rows[layer][begin : op.fields.get("stop")] for name in op.ids]
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        check(fields["kv_indptr"] == ends, "kv_indptr", fields, ends)
        wanted = self.rows.content([row for each in rows for row in each], layer)
        for part, value in zip("kv", wanted, strict=True):
            check(np.array_equal(tensors[part], value), f"gathered {part} differs:", op.ids)

    def _truncate(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        one, length = space.sequences[op.ids[0]], op.fields["length"]
        check(length <= one.length, "cut beyond the length", op.fields, one.length)
        keep = op.fields.get("keep") or ()
        one.rows = [rows[:length] + [rows[at] for at in keep] for rows in one.rows]
        one.committed = min(
            one.committed, length // self.geometry.page_size * self.geometry.page_size
        )
        check(fields["lengths"] == [len(rows) for rows in one.rows], "lengths after a cut", fields)

    def _delete_sequence(self, space: Namespace, op: Op, *_: Any) -> None:
        self._drop(space, op.ids[0])

    def _drop(self, space: Namespace, name: str) -> None:
        space.sequences.pop(name, None)
        space.marks.pop(name, None)

    def _delete_sequences(
        self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float
    ) -> None:
        prefix = op.fields["prefix"]
        names = [name for name in space.sequences if name.startswith(prefix)]
        certain = [name for name in names if not self.may_be_gone(space, name, now)]
        count = fields["num_deleted"] + len(fields.get("skipped") or ())
        num_hidden = len(space.imports)
        right = len(certain) <= count <= len(names) + num_hidden
        check(right, "deleted", fields, "of", names)
        for name in names:
            if name not in (fields.get("skipped") or ()):
                self._drop(space, name)

    def _get_sequence(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        lengths = [len(rows) for rows in space.sequences[op.ids[0]].rows]
        check(fields["lengths"] == lengths, "lengths", fields, lengths)

    def _list_sequences(
        self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float
    ) -> None:
        found = {one["id"] for one in fields["sequences"]}
        for name in space.sequences:
            right = name in found or self.may_be_gone(space, name, now)
            check(right, "a sequence is not listed:", name)
        making = {new["id"] for one in self.outstanding if one.space is space for new in one.new}
        extra = {name for name in found if name not in space.sequences} - making
        check(not extra, "listed sequences that are not there:", sorted(extra))

    def _pool(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        check(fields["integrity"] == "ok", "integrity", fields)

    def _export_sequence(
        self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float
    ) -> None:
        one = space.sequences[op.ids[0]]
        if op.plan is None:
            lengths = [len(rows) for rows in one.rows]
            check(fields["header"]["lengths"] == lengths, "exported lengths", fields, lengths)
            return
        wanted = [
            self.rows.content(one.rows[layer][first:last], layer) for layer, first, last in op.plan
        ]
        for half, part in enumerate("kv"):
            value = np.concatenate([each[half] for each in wanted]) if wanted else tensors[part]
            right = np.array_equal(tensors[part], value)
            check(right, f"exported {part} differs:", op.ids, op.fields["part"])

    def _import_sequence(
        self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float
    ) -> None:
        name = op.ids[0]
        if fields["state"] != "done":
            space.imports[name] = op.plan["pages"], now
            return
        space.imports.pop(name, None)
        old = space.sequences.get(name)
        check(old is None or self.may_be_gone(space, name, now), "imported twice:", name)
        space.marks.pop(name, None)
        rows = [list(one) for one in op.plan["rows"]]
        space.sequences[name] = Sequence_(rows, op.sent, op.plan["ttl_s"])

    def _cancel_import(self, space: Namespace, op: Op, *_: Any) -> None:
        space.imports.pop(op.ids[0], None)

    def _hand_over(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        name, state = op.ids[0], op.fields["state"]
        check(name in space.sequences, "hand-over of a sequence that is not there:", name)
        mark = space.marks.get(name)
        if state == "leaving":
            gone = mark is None or (not mark.is_handed and now >= mark.since + mark.for_s)
            check(gone, "left twice:", name)
            space.marks[name] = Mark(op.fields["for_s"], op.sent)
        elif state == "handed":
            check(mark is not None, "handed without leaving:", name)
            space.marks[name] = Mark(op.fields["for_s"], op.sent, is_handed=True)
        else:
            check(mark is not None, f"{state} without leaving:", name)
            space.marks.pop(name, None)
            if state == "gone":
                self._drop(space, name)

    def _commit(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        one = space.sequences[op.ids[0]]
        names = self.rows.after(0, op.fields["token_ids"])
        if names != one.rows[0][: len(names)]:
            raise RuntimeError("a program named pages by tokens that are not theirs")
        size = self.geometry.page_size
        most = min(len(names), one.length) // size * size
        check(fields["committed_len"] <= most, "committed_len", fields, most)
        one.committed = max(one.committed, fields["committed_len"])
        if fields["last_key"] is not None:
            rows = names[: fields["committed_len"]]
            old = space.keys.setdefault(fields["last_key"], rows)
            check(old == rows, "one key for two contents:", fields["last_key"])

    def _match_prefix(
        self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float
    ) -> None:
        wanted = self.rows.after(0, op.fields["token_ids"])
        least = self._least_cached(space, wanted, now)
        check(fields["matched_len"] >= least, "held pages were not matched", fields, least)
        if fields["lease"] is not None:
            rows = wanted[: fields["matched_len"]]
            lasts = op.fields["lease_s"]
            space.leases[fields["lease"]["id"]] = rows, op.sent + lasts, now + lasts

    def _lease(self, space: Namespace, op: Op) -> list[int]:
        """The rows of a lease that the engine says is there."""
        check(op.fields["id"] in space.leases, f"{op.name} of a lease that is over:", op.fields)
        rows, _, until = space.leases.pop(op.fields["id"])
        check(op.sent < until, f"{op.name} of an expired lease:", op.fields, until)
        return rows

    def _release_lease(self, space: Namespace, op: Op, *_: Any) -> None:
        self._lease(space, op)

    def _renew_lease(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        rows, lasts = self._lease(space, op), op.fields["lease_s"]
        space.leases[op.fields["id"]] = rows, op.sent + lasts, now + lasts

    def _pin(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        key = op.fields["page_key"]
        check(fields["num_pages"] == self._pages(len(space.keys[key])), "pinned", fields)
        if op.fields["hard"]:
            space.pins.add(key)

    def _unpin(self, space: Namespace, op: Op, *_: Any) -> None:
        space.pins.discard(op.fields["page_key"])

    def _holds(self, space: Namespace, op: Op, fields: Any, tensors: Any, now: float) -> None:
        found = {one["lease"] for one in fields["holds"]} - {None}
        certain = {name for name, (_, until, _) in space.leases.items() if now < until}
        may = {name for name, (*_, until) in space.leases.items() if op.sent < until}
        opening = any(one.name == "match_prefix" for one in self.outstanding)
        check(certain <= found, "a lease is missing:", certain - found)
        check(opening or found <= may, "leases that are over:", found - may)
        pins = {one["page_key"] for one in fields["holds"] if one["lease"] is None}
        check(pins == space.pins, "hard pins", pins, space.pins)

    def _evict(self, space: Namespace, *_: Any) -> None:
        """Frees cached pages; what is held stays."""

    _clear = _evict

    def _set_namespace(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        space.max_pages, space.reserved = op.fields["max_pages"], op.fields["reserved_pages"]
        space.most_used = fields["used"]
        self._faults.append("quota changes")
        self._get_namespace(space, op, fields)

    def _get_namespace(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        quota = fields["max_pages"], fields["reserved_pages"]
        check(quota == (space.max_pages, space.reserved), "quota", fields, space.max_pages)
        if space.max_pages is not None:
            most = max(space.max_pages, space.most_used)
            check(fields["used"] <= most, "more pages than the quota:", fields, most)

    def _page_table(self, space: Namespace, op: Op, fields: Any, *_: Any) -> None:
        layer = op.fields["layer"]
        pages = [self._pages(len(space.sequences[name].rows[layer])) for name in op.ids]
        ends = np.cumsum([0, *pages]).tolist()
        check(fields["kv_indptr"] == ends, "kv_indptr of a page table", fields, ends)


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def attention(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """One query [Hq, D] over k, v [t, Hkv, D] in float64: o [Hq, D] and lse [Hq]."""
    if not len(k):
        return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    group = q.shape[0] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("hd,thd->ht", q.astype(np.float64), keys) * q.shape[1] ** -0.5
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1)
    o = np.einsum("ht,thd->hd", weights, values) / total[:, None]
    return o, np.log(total) + top[:, 0]
