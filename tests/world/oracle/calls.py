"""Calls as values, and what each does with sequences: the rules that both oracles share.

A row of K and V is a number: the token and all before it make its content, as in a model's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from kernels.backend import PoolGeometry
from tests.oracle import attend, visible

NUM_LAYERS: Final = 2
SPACES: Final = ("ours", "theirs")  # namespaces of callers
TOLERANCE: Final = 2e-4
NO_SEQUENCE: Final = (
    *("release_lease", "renew_lease", "cancel_import", "get_import", "import_sequence"),
)
"""Operations whose `id` is not that of a sequence that must be there."""
READING: Final = (
    *("decode", "prefill", "step", "gather", "get_sequence", "page_table", "export_sequence"),
    *("cascade", "ragged_prefill", "merge"),
)
"""Operations that change no sequence, unless they bring rows."""
CUTTING: Final = ("truncate", "truncate_sequences")
ENDING: Final = ("delete_sequence", "delete_sequences", "loss")  # the last by a process

Every = tuple[tuple[int, ...], ...]  # a sequence's rows at each layer
Outcome = tuple[Any, ...]  # "ok" and a sequence's rows, or the codes that are right
NOT_NOW: Final[Outcome] = ()  # the call cannot take effect now


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
Answer = tuple[dict[str, Any], dict[str, Any]]  # fields and tensors of a success


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

    def content(self, rows: Sequence[int], layer: int) -> Any:
        """k and v of rows, [2, n, Hkv, D]."""
        heads, dim = self.geometry.num_kv_heads, self.geometry.head_dim
        at = np.asarray(rows, np.float64).reshape(-1, 1, 1, 1)
        place = np.arange(2 * heads * dim, dtype=np.float64).reshape(2, heads, dim)
        values = np.sin(at * 12.9898 + place * 78.233 + layer * 3.7) * 2
        return values.astype(np.float32).swapaxes(0, 1)

    def is_chain(self, rows: Sequence[int]) -> bool:
        """Whether each row's content belongs behind the row before it."""
        return [self.parents[row] for row in rows] == [0, *rows[:-1]]


@dataclass(eq=False)
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
    faults: int = 0  # that happened before it was sent
    space: Any = None
    session: int = 0
    number: int = 0  # of the call, in its session
    reply: tuple[int, bytes] | None = None  # status and image, as the engine answered
    answer: Answer | None = None
    seen: Every = ()  # rows of its last sequence, as the oracle has them then

    def __post_init__(self) -> None:
        fields = self.fields
        self.new: list[dict[str, Any]] = []  # sequences that it makes
        self.ids: list[str] = []  # of sequences that must be there
        self.layers = fields.get("layers") or [fields.get("layer", 0)]
        if self.name == "create_sequences":
            self.new = fields["sequences"]
        elif self.name not in NO_SEQUENCE:
            one = [fields["id"]] if "id" in fields else []
            levels = [name for level in fields.get("levels", ()) for name in level["sequences"]]
            self.ids = fields.get("sequences") or fields.get("ids") or levels or one
        self.parents = [new["parent"] for new in self.new if "parent" in new]

    @property
    def made(self) -> list[str]:
        """Ids of sequences that it makes; that of one which the service names comes last."""
        if self.name == "import_sequence":
            return [self.fields["id"]]
        if self.answer is not None and self.new:
            return [view["id"] for view in self.answer[0]["sequences"]]
        return [new.get("id", "") for new in self.new]

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


def call(name: str, /, **fields: Any) -> Op:
    """A call without tensors."""
    return Op(name, fields)


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

    @property
    def cut(self) -> tuple[int, list[int]]:
        """Of a truncation: the length, and positions of further rows that are kept."""
        fields = self.op.fields
        length = fields["length"] if "length" in fields else fields["lengths"][self.at]
        return length, fields.get("keep") or []

    def apply(self, there: Sequences, number: int) -> Outcome:
        """Changes the sequences; `number` is that of the effect."""
        op, name = self.op, self.name
        if op.made:
            return self._make(there, number)
        if op.name == "loss" and (name not in there or there[name].made > number):
            return NOT_NOW
        if name not in there:
            return ("ok",) if op.name == "delete_sequences" else ("unknown_sequence",)
        if op.name in ENDING:
            del there[name]
            return ("ok",)
        made, rows = there[name]
        if op.name in CUTTING:
            length, keep = self.cut
            if "layer" in op.fields:
                at = op.fields["layer"]
                if length > len(rows[at]):
                    return ("invalid_request",)
                every = list(rows)
                every[at] = rows[at][:length]
                there[name] = Held(made, tuple(every))
                return ("ok", there[name].rows)
            if max([length, *(at + 1 for at in keep)]) > min(map(len, rows)):
                return ("invalid_request",)
            rows = tuple((*some[:length], *(some[at] for at in keep)) for some in rows)
        elif op.rows:
            lengths = {len(rows[layer]) for layer in op.layers}
            if len(lengths) > 1:
                return ("invalid_request",)
            if "offsets" in op.fields and lengths != {op.fields["offsets"][self.at]}:
                return ("length_mismatch",)
            added = [op.rows[self.at] if at in op.layers else () for at in range(NUM_LAYERS)]
            rows = tuple((*some, *more) for some, more in zip(rows, added, strict=True))
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
            case "truncate_sequences":
                return bool(fields["sequences"][at]["lengths"] == lengths)
            case "get_sequence" | "truncate":
                return bool(fields["lengths"] == lengths)
            case "page_table":
                pages = -(-lengths[op.layers[0]] // rule.geometry.page_size)
                return bool(fields["kv_indptr"][at + 1] - fields["kv_indptr"][at] == pages)
            case "decode" | "prefill":
                queries = op.fields.get("qo_indptr") or range(len(op.ids) + 1)
                span, (layer,) = slice(*queries[at : at + 2]), op.layers
                q, causal = op.tensors["q"][span], op.fields.get("causal", False)
                found = tensors["o"][span], tensors["lse"][span]
                return attends(q, rule.content(rows[layer], layer), found, causal=causal)
            case "step":
                each = zip(op.layers, op.tensors["q"], tensors["o"], tensors["lse"], strict=True)
                ends = op.fields.get("qo_indptr") or range(len(op.ids) + 1)
                one, own = slice(*ends[at : at + 2]), op.plan and op.plan[at]
                rules = {"causal": op.fields.get("causal", False), "own": own}
                return all(
                    attends(q[one], rule.content(rows[layer], layer), (o[one], lse[one]), **rules)
                    for layer, q, o, lse in each
                )
            case "gather":
                (layer,), span = op.layers, slice(*fields["kv_indptr"][at : at + 2])
                return same(tensors, span, [rule.content(rows[layer], layer)])
            case "export_sequence" if op.plan is None:
                return bool(fields["header"]["lengths"] == lengths)
            case "export_sequence":
                parts = ((layer, rows[layer][first:last]) for layer, first, last in op.plan)
                return same(tensors, slice(None), [rule.content(some, at) for at, some in parts])
        return True


def is_right_of_several(op: Op, rule: Rows, there: Sequences) -> bool:
    """Whether the answer is right of attention to rows that no one sequence has alone."""
    (_, found), q, (layer,) = op.answer or ({}, {}), op.tensors.get("q"), op.layers
    ends, parts = op.fields.get("qo_indptr"), op.plan
    if op.name == "cascade":  # all rows to the first, each to one more
        first, *others = (there[name].rows[layer] for name in op.ids)
        parts = [[*first, *rows] for rows in others]
    elif op.name == "merge":
        q, parts = parts
    spans = [slice(*ends[at : at + 2]) for at in range(len(parts))] if ends else None
    each = zip(spans or [slice(at, at + 1) for at in range(len(parts))], parts, strict=True)
    return all(
        attends(q[one], rule.content(rows, layer), (found["o"][one], found["lse"][one]))
        for one, rows in each
    )


def same(tensors: Any, span: slice, parts: list[Any]) -> bool:
    """Whether k and v hold the content of all parts, one after another."""
    found = [tensors["k"][span], tensors["v"][span]]
    return not parts or np.array_equal(found, np.concatenate(parts, axis=1))


def attention(q: Any, content: Any, *, causal: bool = False, own: Any = None) -> Any:
    """o and lse of queries over k and v, in float64; `own` is a mask of the last keys."""
    k, v = content
    seen = visible(len(q), len(k), causal=causal)
    if own is not None:
        before = len(k) - len(q)
        seen[:, max(before, 0) :] &= own[:, max(-before, 0) :]
    return attend(q, k, v, seen, sm_scale=q.shape[-1] ** -0.5)


def attends(q: Any, content: Any, found: Any, **rules: Any) -> bool:
    """Whether queries attended to k and v, with o and lse as their result."""
    o, lse = attention(q, content, **rules)
    close = partial(np.allclose, atol=TOLERANCE, rtol=TOLERANCE)
    return bool(close(found[0], o) and close(found[1], lse))
