"""The fields of every request and answer as pydantic models: what is checked, and what is told.

Models are strict (no `"3"` for 3, no `true` for 1) and know every field they take: an option that
a route does not apply is refused, not ignored. Rules that need the tensors or the service's
geometry are in `service/http/building.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import InvalidRequest

INT32_MAX: Final = 2**31 - 1
ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_PAGE: Final = 1000
FLOAT32_SMALLEST: Final = float(np.finfo(np.float32).tiny)
FLOAT32_LARGEST: Final = float(np.finfo(np.float32).max)


def check_cap(value: float) -> float:
    """The kernels divide by the cap in float32: it is 0 or a normal float32."""
    if value and value < FLOAT32_SMALLEST:
        raise ValueError("must be 0 (off) or a normal float32")
    return value


SequenceId = Annotated[str, Field(pattern=ID_PATTERN, examples=["chat-1"])]
Ids = Annotated[list[SequenceId], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Counts = list[Count]
LseBase = Literal["e", "2"]
Scale = Annotated[float, Field(ge=FLOAT32_SMALLEST, le=FLOAT32_LARGEST)]
Cap = Annotated[float, Field(ge=0.0, le=FLOAT32_LARGEST), AfterValidator(check_cap)]
DType = Literal["fp32", "fp16", "bf16"]


class Fields(BaseModel):
    """Base of all: strict, closed, immutable, finite numbers only."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class NewSequenceFields(Fields):
    """One sequence to make: empty, or a fork of `parent`."""

    id: SequenceId | None = None
    """Made by the service when absent."""
    parent: SequenceId | None = None
    """Fork this sequence: share its full pages, copy the rows of a partial last one."""
    length: Count | None = None
    """Fork at this many tokens; all of the parent's when absent."""

    @model_validator(mode="after")
    def check_length(self) -> NewSequenceFields:
        if self.length is not None and self.parent is None:
            raise ValueError("length is that of a fork: give parent as well")
        return self


class CreateFields(Fields):
    sequences: Annotated[list[NewSequenceFields], Field(min_length=1, max_length=65536)]
    """All are made, or none."""


class TruncateFields(Fields):
    length: Count
    """Tokens to keep, at every layer; at most the sequence's length."""


class PageTableFields(Fields):
    sequences: Ids
    layer: Count = 0


class AppendFields(Fields):
    layer: Count
    sequences: Ids
    append_indptr: Counts | None = None
    """int32 [B+1]: sequence b gets rows `append_indptr[b]:append_indptr[b+1]` of k and v. Absent:
    one row per sequence."""
    offsets: Counts | None = None
    """kv_len at which the caller believes each sequence stands; a mismatch is a 409 that changes
    nothing, so a retry after a lost reply is safe."""


class ScoringFields(Fields):
    """What every attention route takes."""

    sm_scale: Scale | None = None
    """Multiplies q.k; absent: head_dim ** -0.5."""
    logits_soft_cap: Cap = 0.0
    """When above 0, scores become cap * tanh(score / cap)."""
    lse_base: LseBase = "e"
    """Base of the log-sum-exp in the answer: natural, or 2."""


class WindowFields(ScoringFields):
    window_left: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    """A query sees at most this many keys before its own position; -1 is off."""


class PagedFields(WindowFields):
    layer: Count
    sequences: Ids
    cascade: Literal["auto", "always", "never"] = "auto"
    """Whether KV shared by several of the sequences is read once for all of them."""
    offsets: Counts | None = None
    """With k and v only: as in append."""


class DecodeFields(PagedFields):
    pass


class PrefillFields(PagedFields):
    qo_indptr: Counts
    """int32 [B+1]: sequence b owns rows `qo_indptr[b]:qo_indptr[b+1]` of q, o (and k, v)."""
    causal: bool = False
    """Hide keys after a query's own position; queries are the last of their sequence."""


class RaggedPrefillFields(WindowFields):
    qo_indptr: Annotated[Counts, Field(min_length=2)]
    """int32 [B+1] over rows of q."""
    kv_indptr: Annotated[Counts, Field(min_length=2)]
    """int32 [B+1] over rows of k and v."""
    causal: bool = False
    """Hide keys after a query's own position (aligned bottom-right)."""


class CascadeLevelFields(Fields):
    sequences: Ids
    qo_indptr: Counts
    """int32 [S+1]: rows `qo_indptr[s]:qo_indptr[s+1]` of q attend the whole of sequence s. Rows
    before the first and after the last see nothing at this level."""


class CascadeFields(ScoringFields):
    layer: Count
    levels: Annotated[list[CascadeLevelFields], Field(min_length=1, max_length=16)]
    """Level 0 is the most shared."""
    causal: bool = False
    """Applies to the last level."""
    return_levels: bool = False
    """Answer each level's own state too: `o.0`, `lse.0`, ..."""


class MergeFields(Fields):
    lse_base: LseBase = "e"
    """Base of the log-sum-exp given and answered."""
    indptr: Annotated[Counts, Field(min_length=1)] | None = None
    """int32 [T+1] over ragged states; absent: dense `o [T, n, H, D]`, `lse [T, n, H]`."""


class GatherFields(Fields):
    layer: Count
    sequences: Ids
    dtype: DType | None = None
    """Of k and v in the answer. Absent: the pool's own, fp16 where that is fp8."""


# Answers.


class SequenceAnswer(Fields):
    id: SequenceId
    length: Count
    """The least over layers."""
    lengths: Counts
    """kv_len per layer."""
    pages: Count
    last_page_len: Count
    """Tokens in the last page; 0 when the sequence is empty."""
    parent: SequenceId | None
    """Whom it is a fork of."""


class CreatedAnswer(Fields):
    sequences: list[SequenceAnswer]


class ListAnswer(Fields):
    sequences: list[SequenceAnswer]
    """By id."""
    next: SequenceId | None
    """Give it as `after` for the next page; null at the end."""


class LevelAnswer(Fields):
    qo_indptr: Counts
    kv_indptr: Counts
    kv_indices: Counts
    kv_last_page_len: Counts


class PageTableAnswer(Fields):
    kv_indptr: Counts
    """int32 [B+1] over pages."""
    kv_indices: Counts
    """Page ids."""
    kv_last_page_len: Counts
    """1..page_size, or 0 for an empty sequence."""
    levels: list[LevelAnswer]
    """Per cascade level, over rows in `order`."""
    order: Counts
    """Row i of the levels is sequence `order[i]` of the request."""


class AppendAnswer(Fields):
    lengths: Counts
    """kv_len at that layer after the append, in the request's order."""


class AttentionAnswer(Fields):
    lse_base: LseBase
    levels: Count
    """Cascade levels that ran; 1 is flat."""
    cascade: bool
    """Whether shared KV was read once for the sequences that share it."""


class MergeAnswer(Fields):
    lse_base: LseBase


class GatherAnswer(Fields):
    kv_indptr: Counts
    """Sequence b owns rows `kv_indptr[b]:kv_indptr[b+1]` of k and v (tokens, not pages)."""


class PoolAnswer(Fields):
    free: Count
    referenced: Count
    total: Count
    sequences: Count
    nodes: Count
    sharing_ratio: float
    """Tokens seen by sequences over tokens stored; 1 when nothing is shared."""
    integrity: str
    """"ok", or what is broken."""


class LimitsAnswer(Fields):
    max_body_bytes: int
    max_json_body_bytes: int
    queue_depth: int
    deadline_s: float


class InfoAnswer(Fields):
    version: str
    instance_id: str
    """Changes when the process starts anew, and the pool with it."""
    backend: str
    device: str
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    layout: Literal["NHD", "HND"]
    dtype: Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
    k_scale: float
    v_scale: float
    tensor_dtypes: list[str]
    """What q, k, v and o may be."""
    unsupported: list[str]
    """What this backend refuses."""
    limits: LimitsAnswer


class HealthAnswer(Fields):
    status: Literal["live", "ready"]


class Problem(BaseModel):
    """RFC 9457: every error answer. The numbers that matter stand beside `detail`."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str


Model = TypeVar("Model", bound=Fields)


def validate(model: type[Model], fields: Any) -> Model:
    """The fields as a model; `InvalidRequest` with the first field that breaks a rule."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False)) from None


def invalid(problems: list[Any]) -> InvalidRequest:
    """pydantic's first problem in this service's words."""
    problem = problems[0]
    field = ".".join(str(part) for part in problem["loc"]) or "fields"
    match problem["type"]:
        case "extra_forbidden":
            rule = "this route has no such field"
        case "missing":
            return InvalidRequest(field, None, "must be given")
        case _:
            rule = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(field, problem["input"], rule)
