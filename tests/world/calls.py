"""Calls as values, and what each does with sequences: the rules that both oracles share.

A row of K and V is a number: the token and all before it make its content, as in a model's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from kernels.backend import PoolGeometry
from tests.oracle import attend, visible

NUM_LAYERS: Final = 2
TOLERANCE: Final = 2e-4
NO_SEQUENCE: Final = ("release_lease", "renew_lease", "cancel_import", "import_sequence")
"""Operations whose `id` is not that of a sequence that must be there."""
READING: Final = ("decode", "prefill", "gather", "get_sequence", "page_table", "export_sequence")
"""Operations that change no sequence, unless they bring rows."""

Every = tuple[tuple[int, ...], ...]
"""A sequence's rows at each layer."""
Outcome = tuple[Any, ...]
"""What a caller sees: "ok" and a sequence's rows, or the codes that are right. An empty one: the
call cannot take effect now."""
NOT_NOW: Final[Outcome] = ()


class Wrong(AssertionError):
    """The service did what an oracle rules out: a bug of the service, or of the oracle."""


def check(holds: object, text: str, *values: object) -> None:
    if not holds:
        raise Wrong(" ".join([text, *map(repr, values)]))


class Held(NamedTuple):
    """A sequence: the number of the effect that made it, and its rows."""

    made: int
    rows: Every


Sequences = dict[str, Held]


class Rows:
    """The numbers of rows: a tree by token."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
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
        heads, dim = self.geometry.num_kv_heads, self.geometry.head_dim
        at = np.asarray(rows, np.float64).reshape(-1, 1, 1, 1)
        place = np.arange(2 * heads * dim, dtype=np.float64).reshape(2, heads, dim)
        values = np.sin(at * 12.9898 + place * 78.233 + layer * 3.7) * 2
        return values[:, 0].astype(np.float32), values[:, 1].astype(np.float32)

    def is_chain(self, rows: Sequence[int]) -> bool:
        """Whether each row's content belongs behind the row before it."""
        return all(
            self.parents[row] == before for before, row in zip((0, *rows[:-1]), rows, strict=True)
        )


@dataclass(slots=True, eq=False)
class Op:
    """A call. `rows` are those that it appends, `plan` what else an oracle needs to know."""

    name: str
    fields: dict[str, Any]
    tensors: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)
    plan: Any = None
    deadline_s: float = 0.0
    sent: float = 0.0
    is_cancelled: bool = False
    faults: int = 0
    """Length of the log of faults when it was sent."""
    space: Any = None
    session: int = 0
    number: int = 0
    """Of the call, in its session."""
    reply: tuple[str, bytes] | None = None
    """Code and image, as the engine answered."""
    answer: tuple[dict[str, Any], dict[str, Any]] | None = None
    """Fields and tensors of a success."""
    seen: Every = ()
    """Rows of its last sequence, as the oracle has them then."""

    @property
    def ids(self) -> list[str]:
        """Ids of the sequences that must be there."""
        if self.name in NO_SEQUENCE or self.new:
            return []
        ids = self.fields.get("sequences") or self.fields.get("ids")
        return list(ids) if ids else [self.fields["id"]] if "id" in self.fields else []

    @property
    def new(self) -> list[dict[str, Any]]:
        return self.fields["sequences"] if self.name == "create_sequences" else []

    @property
    def parents(self) -> list[str]:
        return [new["parent"] for new in self.new if "parent" in new]

    @property
    def made(self) -> list[str]:
        """Ids of sequences that it makes; that of one which the service names comes last."""
        if self.name == "import_sequence":
            return [self.fields["id"]]
        if self.answer is not None and self.new:
            return [view["id"] for view in self.answer[0]["sequences"]]
        return [new.get("id", "") for new in self.new]

    @property
    def layers(self) -> list[int]:
        return self.fields.get("layers") or [self.fields["layer"]]

    @property
    def written(self) -> set[str]:
        """Sequences that it changes, as far as it names them."""
        is_reading = self.name in READING and not self.rows
        return {*self.made, *(() if is_reading else self.ids)}

    def must_follow(self, other: Op) -> bool:
        """Whether it takes effect after `other`: a later call of the same session on a sequence."""
        if self.session != other.session or self.number < other.number or other.is_cancelled:
            return False
        names, others = ({*one.ids, *one.parents, *one.written} for one in (self, other))
        return not (self.written.isdisjoint(others) and other.written.isdisjoint(names))

    @property
    def steps(self) -> list[Step]:
        """What it does with each sequence."""
        return [Step(self, at) for at in range(len(self.made or self.ids))]


@dataclass(frozen=True, slots=True)
class Step:
    """What a call does with one of its sequences."""

    op: Op
    at: int

    @property
    def name(self) -> str:
        return (self.op.made or self.op.ids)[self.at]

    @property
    def names(self) -> set[str]:
        parent = self.op.new[self.at].get("parent", "") if self.op.new else ""
        return {self.name, parent} - {""}

    @property
    def text(self) -> str:
        """For people, in a trace."""
        op = self.op
        fields = {one: value for one, value in op.fields.items() if one not in ("header", "id")}
        rows = op.rows[self.at] if op.rows else ""
        return f"{op.name} {self.name} {rows} {fields}"

    def apply(self, there: Sequences, number: int) -> Outcome:
        op, name = self.op, self.name
        if op.made:
            return self._make(there, number)
        if name not in there:
            return ("ok",) if op.name == "delete_sequences" else ("unknown_sequence",)
        made, rows = there[name]
        if op.name in ("delete_sequence", "delete_sequences"):
            del there[name]
            return ("ok",)
        if op.name == "truncate":
            length, keep = op.fields["length"], op.fields.get("keep") or []
            if max([length, *(at + 1 for at in keep)]) > min(map(len, rows)):
                return ("invalid_request",)
            rows = tuple((*some[:length], *(some[at] for at in keep)) for some in rows)
        elif op.rows:
            lengths = {len(rows[layer]) for layer in op.layers}
            if len(lengths) > 1:
                return ("invalid_request",)
            if "offsets" in op.fields and lengths != {op.fields["offsets"][self.at]}:
                return ("length_mismatch",)
            rows = tuple(
                (*some, *op.rows[self.at]) if layer in op.layers else some
                for layer, some in enumerate(rows)
            )
        there[name] = Held(made, rows)
        return ("ok", rows)

    def _make(self, there: Sequences, number: int) -> Outcome:
        """A new sequence: empty, a fork, of cached pages, or imported."""
        op, name, plan = self.op, self.name, self.op.plan
        new, rows = op.new[self.at] if op.new else {}, ()
        wrong = ["sequence_exists"] if name in there else []
        if op.name == "import_sequence":
            wrong += ["unknown_import"] if wrong else []
            rows = plan["rows"]
        elif "parent" not in new:
            rows = ((),) * NUM_LAYERS
            if not wrong and (not name or "prefix" in new):
                if op.answer is None:
                    return NOT_NOW  # its id, or how much of it is cached, comes with the answer
                cached = op.answer[0]["sequences"][self.at].get("cached_len", 0)
                rows = (tuple((plan or ())[:cached]),) * NUM_LAYERS
        elif new["parent"] not in there:
            wrong.append("unknown_sequence")
        else:
            every = there[new["parent"]].rows
            lengths = [len(some) for some in every]
            rows = tuple(some[: new.get("length")] for some in every)
            if new.get("length", max(lengths)) > min(lengths):
                wrong.append("invalid_request")
        if wrong:
            return tuple(wrong)
        there[name] = Held(number, rows)
        return ("ok", rows)

    def is_right(self, rows: Every, rule: Rows) -> bool:
        """Whether the answer is right where the sequence holds `rows` afterwards."""
        op, at = self.op, self.at
        fields, tensors = op.answer or ({}, {})
        lengths = [len(some) for some in rows]
        match op.name:
            case "create_sequences":
                return bool(fields["sequences"][at]["lengths"] == lengths)
            case "append":
                return bool(fields["lengths"][at] == lengths[op.layers[0]])
            case "get_sequence" | "truncate":
                return bool(fields["lengths"] == lengths)
            case "page_table":
                pages = -(-lengths[op.layers[0]] // rule.geometry.page_size)
                return bool(fields["kv_indptr"][at + 1] - fields["kv_indptr"][at] == pages)
            case "decode" | "prefill":
                return self._attends(rows[op.layers[0]], rule)
            case "gather":
                (layer,), span = op.layers, slice(*fields["kv_indptr"][at : at + 2])
                found = tensors["k"][span], tensors["v"][span]
                return same(found, [rule.content(rows[layer], layer)])
            case "export_sequence" if op.plan is None:
                return bool(fields["header"]["lengths"] == lengths)
            case "export_sequence":
                wanted = [
                    rule.content(rows[layer][first:last], layer) for layer, first, last in op.plan
                ]
                return same((tensors["k"], tensors["v"]), wanted)
        return True

    def _attends(self, rows: Sequence[int], rule: Rows) -> bool:
        op, (_, tensors) = self.op, self.op.answer or ({}, {})
        queries = op.fields.get("qo_indptr") or range(len(op.ids) + 1)
        span = slice(*queries[self.at : self.at + 2])
        q, (k, v) = op.tensors["q"][span], rule.content(rows, op.layers[0])
        seen = visible(len(q), len(rows), causal=op.fields.get("causal", False))
        wanted = attend(q, k, v, seen, sm_scale=q.shape[-1] ** -0.5)
        return all(
            np.allclose(tensors[name][span], value, atol=TOLERANCE, rtol=TOLERANCE)
            for name, value in zip(("o", "lse"), wanted, strict=True)
        )


def same(found: Sequence[Any], wanted: Sequence[tuple[Any, Any]]) -> bool:
    """Whether k and v hold the rows of all spans, one after another."""
    return not wanted or all(
        np.array_equal(part, np.concatenate(each))
        for part, each in zip(found, zip(*wanted, strict=True), strict=True)
    )
