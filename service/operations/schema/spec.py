"""Declarations of operations, and the check of a request's header against them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from attnd.wire.dtypes import DTYPE_NAMES
from attnd.wire.images import Entry
from attnd.wire.operations import ROUTES
from pydantic import BaseModel, ValidationError

from service.errors import invalid_fields, unknown_tensor
from service.image.reading import Layout, read_layout
from service.operations.schema.answers import answer_of
from service.operations.schema.fields import NAMING, Entries, Fields, InfoAnswer, refuse
from service.tenants import OPEN, Scope, Tenant

Routing = Literal[
    "sequence",  # the engine of the sequence that `id` names
    "sequences",  # a batch: split by where its sequences are, joined in order
    "together",  # sequences that must all be on one engine
    "placed",  # creates sequences: on an engine with free pages and most of their prefix
    "everywhere",  # all engines; their replies are combined
    "anywhere",  # any engine: it does not use the pool
    "lease",  # the engine that gave the lease, as the lease's id says
    "engine",  # the engine named by the path
    "imported",  # an import: placed at its start, then the engine where it started
]


def default_routing(operation: Operation) -> Routing:
    """The routing that the fields imply: by the sequence in the path, or by the batch.

    Raises ValueError if they imply neither.
    """
    fields = operation.fields.model_fields
    if "id" in operation.path_names and NAMING in fields["id"].metadata:
        return "sequence"
    if "sequences" in fields and is_ids(fields["sequences"].annotation):
        return "sequences"
    raise ValueError(f"{operation.name}: its fields imply no routing: declare it")


def is_ids(kind: Any) -> bool:
    """Whether a type is a list of sequence ids."""
    return any(NAMING in getattr(part, "__metadata__", ()) for part in get_args(kind))


WITHOUT_POOL: Final = frozenset(
    {
        *("info", "engines", "drain_engine", "snapshot"),
        *("get_namespace", "set_namespace", "list_namespaces"),
    }
)
"""Operations of a service without a pool, beside those on records."""
Symbols = tuple[str | int, ...]

MAX_QO_HEADS: Final = 65535
AT_LEAST_ONE: Final = frozenset({"Hq", "Hkv", "H", "D", "Dv"})
"""Symbols whose size is at least 1 in every tensor."""
LONG_NAMES: Final = {
    "Hq": "num_qo_heads",
    "Hkv": "num_kv_heads",
    "D": "head_dim",
    "Dv": "v_head_dim",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor; `{i}` in its name is the number of a cascade level.

    A symbol in shapes has one size in all tensors of a request: B sequences, n query rows, nnz rows
    of K and V or of states, T lists of states, Hq query heads, Hkv KV heads, D head dimension of
    q and k, Dv of v and o.
    `ragged` is the shape if the fields are ragged (`is_ragged`); `like` names the tensor whose
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
    """One operation of the service, independent of any protocol.

    `attnd.wire` has its number in the road's frames, HTTP's method and path (of a step: 0 and
    empty, as it has its own frame), and its answer (None: the reply has no fields). Parameters of
    the path, and of the query of a method without a body, are fields. A key needs `scope`; with the
    tensor `appended_with` also `append`. `frees`: it only releases pages, so a full queue accepts
    it. `status` 0: 200, or 204 without fields. `routing` None: `routed` is derived from the fields.
    """

    name: str
    summary: str
    tag: str
    fields: type[Fields]
    scope: Scope
    answer: type[BaseModel] | None = None
    description: str = ""
    takes: tuple[TensorSpec, ...] = ()
    gives: tuple[TensorSpec, ...] = ()
    status: int = 0
    frees: bool = False
    appended_with: str = ""
    answer_text: str = "The answer."
    routing: Routing | None = None
    routed: Routing = field(init=False)
    number: int = field(init=False)
    method: str = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        number, method, path = ROUTES.get(self.name, (0, "", ""))
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "answer", self.answer or answer_of(self.name))
        object.__setattr__(self, "routed", self.routing or default_routing(self))
        object.__setattr__(self, "status", self.status or (204 if self.answer is None else 200))

    @property
    def needs_pool(self) -> bool:
        """Whether it is about pages: a service without a pool refuses it."""
        return self.name not in WITHOUT_POOL and self.tag != "records"

    @property
    def path_names(self) -> tuple[str, ...]:
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))

    @property
    def query_names(self) -> tuple[str, ...]:
        if self.has_body:
            return ()
        return tuple(name for name in self.fields.model_fields if name not in self.path_names)

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def has_tensors(self) -> bool:
        """Whether request or reply has tensors, so that safetensors is accepted beside JSON."""
        return bool(self.takes or self.gives)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose header was checked; valid for every body with that header."""

    operation: Operation
    fields: Any
    layout: Layout
    """Where the tensors are; its own fields are empty, those above are the checked ones."""
    known: dict[str, Any] = field(default_factory=dict)
    """Whatever the engine derives from the header alone, for all requests of that header."""


def prepare(
    operation: Operation, header: bytes, room: int, info: InfoAnswer, tenant: Tenant = OPEN
) -> Prepared:
    """Check a request by its image's header, with `room` bytes of tensors after it.

    Sequence ids in the result have the tenant's prefix, as in the tree. The engine checks what
    depends on the pool's state: ids, lengths, pages, and the length of a mask over the pool.

    Raises `Forbidden`, `MalformedBody` and `InvalidRequest`.
    """
    tenant.require(operation.scope, operation.name)
    layout = read_layout(header, room)
    fields = validate(operation.fields, layout.fields)
    entries = {entry.name: entry for entry in layout.entries}
    sizes, ragged = fields.sizes(info), fields.is_ragged()
    check_tensors(operation.takes, entries, sizes, ragged, fields.group_words(info))
    fields.check(entries, info)
    names = "token_ids" in entries or getattr(fields, "token_ids", None) is not None
    if operation.appended_with and (names or operation.appended_with in entries):
        with_what = operation.appended_with if operation.appended_with in entries else "token_ids"
        tenant.require("append", f"{operation.name} with {with_what}")
    fields.put_before_ids(tenant.prefix)
    return Prepared(operation, fields, Layout({}, layout.entries))


Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], fields: Any) -> Model:
    """The fields as a model; `InvalidRequest` with the first field that breaks a rule."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(model, error) from None


def check_tensors(
    takes: tuple[TensorSpec, ...],
    entries: Entries,
    sizes: dict[str, int],
    ragged: bool,
    group: str = "",
) -> None:
    """Check names, dtypes and shapes of a request's tensors; adds sizes of symbols to `sizes`.

    `group` names the layer group that the pool's sizes are of.
    """
    check_names(takes, entries)
    for spec in takes:
        if (entry := entries.get(spec.name)) is not None:
            check_dtype(spec, entry, entries)
            shape = spec.ragged if ragged and spec.ragged is not None else spec.shape
            check_shape(entry, shape, sizes, group)
    if "Hq" in sizes:
        check_heads("q.shape", list(entries["q"].shape), sizes["Hq"], sizes["Hkv"], group)


def check_names(takes: tuple[TensorSpec, ...], entries: Entries) -> None:
    """Check that all required tensors are given, and no unknown ones."""
    known = {spec.name for spec in takes}
    if missing := {spec.name for spec in takes if not spec.optional} - entries.keys():
        refuse(f"tensors.{min(missing)}", None, "must be given")
    if extra := entries.keys() - known:
        raise unknown_tensor(min(extra), sorted(known))


def check_dtype(spec: TensorSpec, entry: Entry, entries: Entries) -> None:
    name = DTYPE_NAMES[entry.dtype]
    if name not in spec.dtypes:
        several = "one of " * (len(spec.dtypes) > 1)
        rule = f"must be {several}{', '.join(spec.dtypes)}: convert the array first"
        if "F32" in spec.dtypes:
            rule += ', in numpy with .astype("float32")'
        refuse(f"{spec.name}.dtype", name, rule)
    other = entries.get(spec.like)
    if other is not None and other.dtype != entry.dtype:
        rule = f"must be that of {spec.like}, {DTYPE_NAMES[other.dtype]}"
        refuse(f"{spec.name}.dtype", name, rule)


def check_shape(entry: Entry, shape: Symbols, sizes: dict[str, int], group: str = "") -> None:
    """Check a tensor's shape; adds the sizes of its new symbols to `sizes`."""
    found = dict(sizes)
    right = len(shape) == len(entry.shape)
    for symbol, got in zip(shape, entry.shape, strict=False):
        want = symbol if isinstance(symbol, int) else found.setdefault(symbol, got)
        right &= want == got and (got > 0 or symbol not in AT_LEAST_ONE)
    if not right:
        refuse(f"{entry.name}.shape", list(entry.shape), shape_rule(shape, sizes) + group)
    sizes.update(found)


def shape_rule(shape: Symbols, sizes: dict[str, int]) -> str:
    """The rule for a shape, with numbers for known symbols."""
    if len(shape) == 1 and shape[0] not in sizes:
        return "must have one dimension"
    words = {one: str(sizes.get(str(one), LONG_NAMES.get(str(one), one))) for one in shape}
    rule = f"must be [{', '.join(words[one] for one in shape)}]"
    free = [words[one] for one in shape if one in AT_LEAST_ONE and one not in sizes]
    return f"{rule}, {' and '.join(free)} at least 1" if free else rule


def check_heads(
    field: str, value: object, num_qo_heads: int, num_kv_heads: int, group: str = ""
) -> None:
    """Check that the query heads, in this field, form equal groups, one per KV head."""
    if num_qo_heads > MAX_QO_HEADS or num_qo_heads % num_kv_heads:
        rule = f"num_qo_heads must be a multiple of num_kv_heads = {num_kv_heads}{group}"
        refuse(field, value, f"{rule}, at most {MAX_QO_HEADS}")
