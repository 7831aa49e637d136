"""How an operation is declared, and how a request's header is checked against its declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, TypeVar, get_args

from attnd.wire.dtypes import DTYPE_NAMES
from pydantic import ValidationError

from service.errors import invalid_fields, unknown_tensor
from service.image.json_pieces import ITEMS, Pieces, finish
from service.image.reading import Entry, Layout, reading_layout
from service.operations.schema.fields import Entries, Fields, refuse, unchecked
from service.operations.schema.info import InfoAnswer
from service.operations.schema.routing import Routing, default_routing
from service.tenants import OPEN, Scope, Tenant

Symbols = tuple[str | int, ...]
Check = Callable[[Any, Entries, InfoAnswer], None]
"""The rules of one operation over its fields and tensors, when each is right by itself."""

MAX_QO_HEADS: Final = 65535
AT_LEAST_ONE: Final = frozenset({"Hq", "Hkv", "H", "D"})
"""Symbols that no tensor may have 0 of."""
LONG_BYTES: Final = 2**17
"""A longer header's fields are renamed by themselves."""
LONG_LIST: Final = 2**14
"""A longer list of plain values is validated by itself."""
LONG_NAMES: Final = {"Hq": "num_qo_heads", "Hkv": "num_kv_heads", "D": "head_dim"}


def never_moved(_: Any) -> str:
    """For operations that have nothing to do with other engines' parts of a sequence."""
    return ""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `{i}` in its name stands for a cascade level's number.

    Symbols in the shape are the same size in all tensors of a request: B sequences, n query rows,
    nnz rows of K and V or of states, T lists of states, Hq query heads, Hkv KV heads, D head
    dimension. `ragged` is the shape when the fields say `is_ragged`; `like` names the tensor whose
    dtype this one must have.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: Symbols
    words: str
    optional: bool = False
    like: str = ""
    ragged: Symbols | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One thing that the service does, free of any protocol.

    `number` names it in the road's frames and never changes. The path's parameters are fields, and
    so are the query parameters of a method without a body. `scope` is what a key must have for it,
    `append` as well where the tensor `appended_with` is given, and `move` as well where
    `moved_with` names a part of the fields. `frees`: it only gives pages back, so a full queue
    takes it. `answer` None: the answer has no fields. `routing` None: its fields tell where it goes
    in a cluster, which `routed` then says.
    """

    name: str
    number: int
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    summary: str
    tag: str
    fields: type[Fields]
    answer: type[Fields] | None
    scope: Scope
    description: str = ""
    takes: tuple[TensorSpec, ...] = ()
    gives: tuple[TensorSpec, ...] = ()
    check: Check = unchecked
    status: int = 200
    frees: bool = False
    appended_with: str = ""
    moved_with: Callable[[Any], str] = never_moved
    answer_text: str = "The answer."
    example: Any = None
    routing: Routing | None = None
    routed: Routing = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "routed", self.routing or default_routing(self))

    @property
    def path_names(self) -> tuple[str, ...]:
        """The fields that the path gives."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))

    @property
    def query_names(self) -> tuple[str, ...]:
        """The fields that a query gives."""
        if self.has_body:
            return ()
        return tuple(name for name in self.fields.model_fields if name not in self.path_names)

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def has_tensors(self) -> bool:
        """Whether request or answer have tensors, so that safetensors is spoken beside JSON."""
        return bool(self.takes or self.gives)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is right as far as its header shows; valid for every body of that header."""

    operation: Operation
    fields: Any
    layout: Layout
    """Where the tensors are; its own fields are empty, those above are the checked ones."""
    is_for_shards: bool = False
    """Whether a field is given that only shards have."""
    known: dict[str, Any] = field(default_factory=dict)
    """Whatever the engine derives from the header alone, for all requests of that header."""


def prepare(
    operation: Operation, header: bytes, room: int, info: InfoAnswer, tenant: Tenant = OPEN
) -> Prepared:
    """A request by its image's header, with `room` bytes of tensors after it.

    Sequences in its fields are then called what the tree calls those of the tenant. What depends on
    the pool's state (ids, lengths, pages, a pooled mask's length) is left to the engine.

    Raises `Forbidden`, `MalformedBody` and `InvalidRequest`.
    """
    return finish(preparing(operation, header, room, info, tenant))


def preparing(
    operation: Operation, header: bytes, room: int, info: InfoAnswer, tenant: Tenant = OPEN
) -> Pieces[Prepared]:
    """As `prepare`, in pieces of some milliseconds."""
    tenant.require(operation.scope, operation.name)
    layout = yield from reading_layout(header, room)
    fields = yield from validating(operation.fields, layout.fields)
    entries = {entry.name: entry for entry in layout.entries}
    check_tensors(operation.takes, entries, fields.sizes(info), fields.is_ragged())
    operation.check(fields, entries, info)
    if operation.appended_with in entries:
        tenant.require("append", f"{operation.name} with {operation.appended_with}")
    if moved_with := operation.moved_with(fields):
        tenant.require("move", f"{operation.name} with {moved_with}")
    if len(header) > LONG_BYTES:
        yield
    named = yield from fields.naming(tenant.prefix)
    return Prepared(operation, named, Layout({}, layout.entries), fields.is_for_shards)


Model = TypeVar("Model", bound=Fields)


def validate(model: type[Model], fields: Any) -> Model:
    """The fields as a model; `InvalidRequest` with the first field that breaks a rule."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(model, error) from None


def validating(model: type[Model], fields: Any) -> Pieces[Model]:
    """As `validate`, in pieces: what lists of objects hold is validated some at a time."""
    for name, given in fields.items():
        if type(given) is not list or len(given) <= ITEMS:
            continue
        if len(given) > LONG_LIST:
            yield
        item = item_of(model, name)
        if item is None:
            continue
        made: list[Any] = []
        try:
            for one in given:
                made.append(item.model_validate(one))
                if not len(made) % ITEMS:
                    yield
        except ValidationError:  # it says so again, as what it is in all
            return validate(model, fields | {name: [*made, given[len(made)]]})
        fields = fields | {name: made}
    return validate(model, fields)


@cache
def item_of(model: type[Fields], name: str) -> type[Fields] | None:
    """The model of a list's items, where they are objects."""
    field = model.model_fields.get(name)
    kinds = () if field is None else get_args(field.annotation)
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Fields):
        return kinds[0]
    return None


def check_tensors(
    takes: tuple[TensorSpec, ...], entries: Entries, sizes: dict[str, int], ragged: bool
) -> None:
    """Names, dtypes and shapes of a request's tensors; `sizes` gains what their shapes tell."""
    check_names(takes, entries)
    for spec in takes:
        if (entry := entries.get(spec.name)) is not None:
            check_dtype(spec, entry, entries)
            shape = spec.ragged if ragged and spec.ragged is not None else spec.shape
            check_shape(entry, shape, sizes)
    if "Hq" in sizes:
        check_heads(sizes["Hq"], sizes["Hkv"])


def check_names(takes: tuple[TensorSpec, ...], entries: Entries) -> None:
    """All the required tensors are there, and none that the operation does not read."""
    known = {spec.name for spec in takes}
    if missing := {spec.name for spec in takes if not spec.optional} - entries.keys():
        refuse(f"tensors.{min(missing)}", None, "must be given")
    if extra := entries.keys() - known:
        raise unknown_tensor(min(extra), sorted(known))


def check_dtype(spec: TensorSpec, entry: Entry, entries: Entries) -> None:
    name = DTYPE_NAMES[entry.dtype]
    if name not in spec.dtypes:
        rule = f"must be one of {', '.join(spec.dtypes)}" if len(spec.dtypes) > 1 else ""
        refuse(f"{spec.name}.dtype", name, rule or f"must be {spec.dtypes[0]}")
    other = entries.get(spec.like)
    if other is not None and other.dtype != entry.dtype:
        rule = f"must be that of {spec.like}, {DTYPE_NAMES[other.dtype]}"
        refuse(f"{spec.name}.dtype", name, rule)


def check_shape(entry: Entry, shape: Symbols, sizes: dict[str, int]) -> None:
    """The tensor's shape is `shape`; symbols met for the first time get their sizes from it."""
    found = dict(sizes)
    right = len(shape) == len(entry.shape)
    for symbol, got in zip(shape, entry.shape, strict=False):
        want = symbol if isinstance(symbol, int) else found.setdefault(symbol, got)
        right &= want == got and (got > 0 or symbol not in AT_LEAST_ONE)
    if not right:
        refuse(f"{entry.name}.shape", list(entry.shape), shape_rule(shape, sizes))
    sizes.update(found)


def shape_rule(shape: Symbols, sizes: dict[str, int]) -> str:
    """What the shape must be, in numbers where they are known."""
    if len(shape) == 1:
        return "must be flat: one dimension"
    words = {one: str(sizes.get(str(one), LONG_NAMES.get(str(one), one))) for one in shape}
    rule = f"must be [{', '.join(words[one] for one in shape)}]"
    free = [words[one] for one in shape if one in AT_LEAST_ONE and one not in sizes]
    return f"{rule}, {' and '.join(free)} at least 1" if free else rule


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Query heads are whole groups, one per KV head."""
    if num_qo_heads > MAX_QO_HEADS or num_qo_heads % num_kv_heads:
        rule = f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}"
        refuse("q.shape", num_qo_heads, f"{rule}, at most {MAX_QO_HEADS}")
