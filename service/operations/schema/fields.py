"""Types of fields, and rules about them, that several operations share.

Rules raise `InvalidRequest` with the field, the value and the rule. Arrays made from fields are
shared by all calls that repeat the same header, so they must not be written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, get_args

import numpy as np
from attnd.wire.bounds import MAX_NAMES, MAX_SEQUENCES
from attnd.wire.dtypes import Array
from attnd.wire.images import Entry
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.errors import InvalidRequest

Int32 = NDArray[np.int32]
Entries = Mapping[str, Entry]
"""Tensors of a request by name."""

INT32_MAX: Final = 2**31 - 1
ID_PATTERN: Final = r"^(\.{0,2}[A-Za-z0-9_:-]|\.{3})[A-Za-z0-9._:-]*$"
MAX_ID_LENGTH: Final = 128
SCALE_SMALLEST: Final = 1e-10
SCALE_LARGEST: Final = 1e10
"""Bounds of `sm_scale` and soft caps: their products and quotients are normal float32 numbers."""
TENSOR_DTYPES: Final = ("F32", "F16", "BF16")
"""Dtypes of q, k, v in requests, and of o in replies."""


def check_cap(value: float) -> float:
    """Check that a cap is 0, or large enough for kernels to divide by it in float32."""
    if value and value < SCALE_SMALLEST:
        raise ValueError(f"must be 0 (off) or at least {SCALE_SMALLEST}")
    return value


class Naming:
    """Marker of field types that name sequences."""


NAMING: Final = Naming()
SequenceId = Annotated[
    str, Field(pattern=ID_PATTERN, max_length=MAX_ID_LENGTH, examples=["chat-1"]), NAMING
]
"""Not `.` and `..`, which are steps in the path of a URL."""
Ids = Annotated[
    list[SequenceId],
    Field(
        min_length=1,
        max_length=MAX_SEQUENCES,
        fail_fast=True,
        json_schema_extra={"uniqueItems": True},
    ),
]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Counts = Annotated[list[Count], Field(fail_fast=True)]
Indptr = Annotated[Counts, Field(min_length=2)]
"""Prefix sums over at least one sequence."""
Offsets = Annotated[Counts, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_NAMES, fail_fast=True)]
LseBase = Literal["e", "2"]
Scale = Annotated[float, Field(ge=SCALE_SMALLEST, le=SCALE_LARGEST)]
Cap = Annotated[float, Field(ge=0.0, le=SCALE_LARGEST), AfterValidator(check_cap)]
DType = Literal["fp32", "fp16", "bf16"]
PoolDType = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]


class Fields(BaseModel):
    """Base of all fields and replies: strict, immutable, without unknown fields, finite numbers."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def sizes(self, info: InfoAnswer) -> dict[str, int]:
        """Known sizes of the symbols in the tensors' shapes."""
        return {}

    def is_ragged(self) -> bool:
        """Whether the tensors have their ragged shapes."""
        return False

    def group_words(self, info: InfoAnswer) -> str:
        """For errors: the layer group whose shapes the tensors have, if the pool has any."""
        shape = info.shape_of(getattr(self, "layer", None))
        return "" if shape.group is None else f" (layer group {shape.group})"

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """Rules that involve several fields and tensors. Raises `InvalidRequest`."""

    def put_before_ids(self, prefix: str) -> None:
        """Put `prefix` before every sequence id, in place: for fields that were just validated, and
        that nothing else has seen. A copy of a thousand items would take some milliseconds."""
        if not prefix:
            return
        held = self.__dict__
        for name in naming_fields(type(self)):
            if held[name] is not None:
                held[name] = prefixed(held[name], prefix)
        for name in CACHED_IDS & (held.keys() - type(self).model_fields.keys()):
            del held[name]


class LimitsAnswer(Fields):
    max_body_bytes: int
    max_json_body_bytes: int
    max_answer_bytes: int
    max_sequences: int
    queue_depth: int
    deadline_s: float
    relative_score_error: float = 2e-6
    """Maximum relative error of a score, also of a soft-capped one near its cap."""


class TierAnswer(Fields):
    name: Literal["host", "disk"]
    total_bytes: int
    """Size of the tier; 0: it is off since a failure, see the log."""
    page_bytes: int
    """Bytes that one page takes."""
    store_s: float | None
    """Measured seconds to write one page to the tier; null: not measured yet."""
    load_s: float | None
    """Measured seconds to load one page from the tier."""


class RecordsAnswer(Fields):
    host_bytes: int
    """In host memory; 0: they are there on their way to the disk only."""
    disk_bytes: int
    """On disk; 0: there is none, or it is off since a failure."""


class GroupAnswer(Fields):
    layers: list[int]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    """Tokens per page."""
    dtype: PoolDType
    window: int | None
    """Keys that a query sees, its own among them; null: all."""
    kind: Literal["attention", "latent"]
    page_bytes: int
    """Bytes that the group uses of a page."""
    padding: float
    """Share of a page's bytes that pads it to the size that all groups have."""


class LayerShape(NamedTuple):
    """Shape of a layer's K and V, its window, and the number of its group where there are any."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    group: int | None = None


class InfoAnswer(Fields):
    version: str
    instance_id: str
    """Id of this run of the process; a restart, which empties the pool, changes it."""
    backend: str
    device: str
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: Literal["NHD", "HND"]
    dtype: PoolDType
    k_scale: float
    v_scale: float
    tensor_dtypes: list[str]
    """Dtypes of q, k, v and o."""
    unsupported: list[str]
    """Features that this backend does not support."""
    numerics: Literal["fast", "invariant"] = "fast"
    """`invariant`: the bits of a row's result do not depend on the rest of its batch."""
    limits: LimitsAnswer
    tiers: list[TierAnswer] | None = None
    """Tiers below the pool. Their seconds change while the process runs."""
    records: RecordsAnswer | None = None
    """Bytes that records can take; null: the service has none."""
    groups: list[GroupAnswer] | None = None
    """Groups of layers, in pools that were made with them; the fields above are then those of the
    first group without a window."""

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        if self.groups is None:
            one = LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)
            return (one,) * self.num_layers
        made = {
            layer: LayerShape(
                group.num_kv_heads, group.head_dim, group.v_head_dim, group.window, number
            )
            for number, group in enumerate(self.groups)
            for layer in group.layers
        }
        return tuple(made[layer] for layer in range(self.num_layers))

    def shape_of(self, layer: int | None) -> LayerShape:
        """The shape of a layer; of layer 0 for one that the pool does not have."""
        return self.shapes[layer if layer is not None and layer < self.num_layers else 0]


class BatchFields(Fields):
    """Fields of an operation on a batch of sequences."""

    sequences: Ids

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.sequences)


class NamingFields(BatchFields):
    """Fields of an operation that may name the tokens of its sequences."""

    token_ids: TokenIds | None = None
    """Ids of tokens of sequences that were made with a prefix, or of their forks: one for each row
    of the request. A page is committed by itself once its ids are known and its rows are stored at
    every layer."""
    ids_indptr: Indptr | None = None
    """int32 [B+1]: sequence b has the ids `ids_indptr[b]:ids_indptr[b+1]`, from its `known_len` on,
    but at most from the first row of the request on. Optional for one sequence."""

    @cached_property
    def ids_array(self) -> NDArray[np.uint32] | None:
        return None if self.token_ids is None else np.array(self.token_ids, np.uint32)

    @cached_property
    def ids_indptr_array(self) -> Int32 | None:
        return None if self.ids_indptr is None else int32(self.ids_indptr)


class ExpectingFields(NamingFields):
    """Fields of an operation on a batch in an expected state."""

    offsets: Offsets | None = None
    """Expected kv_len of each sequence before the call. A mismatch is a 409 that changes nothing,
    so a retry after a lost reply is safe."""

    @cached_property
    def offset_array(self) -> Int32 | None:
        return None if self.offsets is None else int32(self.offsets)


@cache
def naming_fields(model: type[Fields]) -> tuple[str, ...]:
    """The fields of a model that name sequences, or have fields that do."""
    every = model.model_fields.items()
    return tuple(
        name for name, field in every if NAMING in field.metadata or names(field.annotation)
    )


def names(kind: Any) -> bool:
    """Whether a type names sequences."""
    if isinstance(kind, type) and issubclass(kind, Fields):
        return bool(naming_fields(kind))
    if NAMING in getattr(kind, "__metadata__", ()):
        return True
    return any(names(part) for part in get_args(kind))


def prefixed(value: Any, prefix: str) -> Any:
    """The value of a field that names sequences, with the prefix before each id."""
    if isinstance(value, str):
        return prefix + value
    if isinstance(value, list):
        return [prefixed(one, prefix) for one in value]
    value.put_before_ids(prefix)
    return value


CACHED_IDS: Final = frozenset({"ids", "names"})
"""Cached properties that are made of ids."""


class NoFields(Fields):
    """An operation without fields."""


def pool_sizes(info: InfoAnswer, layer: int) -> dict[str, int]:
    """Sizes of the symbols that the pool determines at a layer."""
    shape = info.shape_of(layer)
    return {"Hkv": shape.num_kv_heads, "D": shape.head_dim, "Dv": shape.v_head_dim}


def refuse(field: str, value: object, rule: str) -> NoReturn:
    raise InvalidRequest(field, value, rule)


def check_layer(layer: int, info: InfoAnswer, field: str = "layer") -> None:
    if layer >= info.num_layers:
        refuse(field, layer, f"must be below num_layers = {info.num_layers}")


def check_window(layer: int, window_left: int, info: InfoAnswer) -> None:
    """Check that a window is that of the layer's group, if this has one."""
    shape = info.shapes[layer]
    if shape.window is not None and window_left != shape.window - 1:
        rule = f"layer {layer} is of layer group {shape.group}, whose window_left is "
        refuse("window_left", window_left, f"{rule}{shape.window - 1}: leave it out")


def check_ids(ids: Sequence[str], field: str = "sequences") -> None:
    """Raises `InvalidRequest` for the first duplicate id."""
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        for name in ids:
            if name in seen:
                refuse(field, name, "duplicate id")
            seen.add(name)


def int32(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)


def one_each(batch: int) -> Int32:
    """Prefix sums of one row per sequence."""
    return np.arange(batch + 1, dtype=np.int32)


def check_indptr(
    field: str, sums: Int32, rows: int, batch: int | None = None, *, partial: bool = False
) -> None:
    """Check prefix sums: int32 [batch + 1], from 0 to `rows`, never decreasing.

    `partial`: rows at either end can be omitted.
    """
    if batch is not None and sums.size != batch + 1:
        refuse(field, f"{sums.size} numbers", f"must be {batch + 1}, one more than sequences")
    first, last = int(sums[0]), int(sums[-1])
    if first != 0 and not partial:
        refuse(field, first, "must start at 0")
    falls = sums[1:] < sums[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        refuse(field, f"{sums[at]} at {at}", "must not decrease")
    if last > rows:
        refuse(field, last, f"must not exceed {rows}, the number of rows")
    if last != rows and not partial:
        refuse(field, last, f"must end at {rows}, the number of rows")


def check_one_each(field: str, values: Sequence[object] | None, batch: int) -> None:
    if values is not None and len(values) != batch:
        refuse(field, f"{len(values)} numbers", f"must be {batch}, one per sequence")


def check_batch(fields: BatchFields) -> None:
    """Ids are distinct, with one offset each."""
    check_ids(fields.sequences)
    check_one_each("offsets", getattr(fields, "offsets", None), len(fields.sequences))


def check_ids_given(fields: Any, entries: Entries, rows: int, batch: int) -> None:
    """Check the number of token ids in a field or a tensor: one for each of `rows`, or as
    `ids_indptr` says."""
    given = fields.token_ids
    if "token_ids" in entries:
        if given is not None:
            refuse("token_ids", "given", "is also given as a tensor: omit the field")
        count = entries["token_ids"].shape[0]
        if count > MAX_NAMES:
            refuse("token_ids", f"{count} items", f"at most {MAX_NAMES} in a call")
    elif given is None:
        if fields.ids_indptr is not None:
            refuse("ids_indptr", "given", "goes with token_ids: leave it out")
        return
    else:
        count = len(given)
    if fields.ids_indptr is not None:
        check_indptr("ids_indptr", fields.ids_indptr_array, count, batch)
    elif count != rows and batch > 1:
        rule = f"must be {rows}, one for each row, or say with ids_indptr whose they are"
        refuse("token_ids", f"{count} ids", rule)


def check_sinks(sinks: Array) -> None:
    """Check that sinks are numbers, or -inf for heads without one."""
    wrong = ~(sinks < np.inf)
    if wrong.any():
        head = int(wrong.argmax())
        rule = "must be a finite number, or -inf for a head without a sink"
        refuse("sinks", f"{sinks[head]} of head {head}", rule)


def check_one_mask(entries: Entries) -> None:
    if "mask" in entries and "packed_mask" in entries:
        refuse("tensors.packed_mask", "given", "mask and packed_mask cannot be combined")


def check_mask_length(
    size: int, packed: bool, qo_lens: Int32, kv_lens: Int32, field: str = ""
) -> None:
    """Check that a mask of `size` elements, or bytes if packed, covers each qo_len x kv_len.

    A packed mask is padded to a byte for each sequence. `field` is named in the error; the mask's
    own name if empty.
    """
    areas = np.multiply(qo_lens, kv_lens, dtype=np.int64)
    needed = int(((areas + 7) // 8 if packed else areas).sum())
    if size == needed:
        return
    if packed:
        rule = f"needs {needed} bytes: qo_len x kv_len bits per sequence, padded to a byte each"
        refuse(field or "packed_mask", f"{size} bytes", rule)
    rule = f"needs {needed} elements: qo_len x kv_len per sequence"
    refuse(field or "mask", f"{size} elements", rule)
