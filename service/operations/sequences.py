"""Operations on sequences themselves: made, listed, told, cut, deleted, and their page tables."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

from pydantic import Field

from service.operations.common import (
    Count,
    Counts,
    Entries,
    Fields,
    Ids,
    SequenceId,
    check_ids,
    check_layer,
    refuse,
    unchecked,
)
from service.operations.info import InfoAnswer
from service.operations.spec import Operation

MAX_NEW: Final = 65536
MAX_LISTED: Final = 1000


class NewSequenceFields(Fields):
    """One sequence to make: empty, or a fork of `parent`."""

    id: SequenceId | None = None
    """Made by the service when absent."""
    parent: SequenceId | None = None
    """Fork this sequence: share its full pages, copy the rows of a partial last one."""
    length: Count | None = None
    """Fork at this many tokens; all of the parent's when absent."""


class CreateFields(Fields):
    sequences: Annotated[
        list[NewSequenceFields], Field(min_length=1, max_length=MAX_NEW, fail_fast=True)
    ]
    """All are made, or none."""


class ListFields(Fields):
    after: SequenceId | None = None
    """List those after this id; absent: from the start."""
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 100
    """At most so many."""


class SequenceFields(Fields):
    """One sequence, named by the path."""

    id: SequenceId


class TruncateFields(Fields):
    id: SequenceId
    length: Count
    """Tokens to keep, at every layer; at most the sequence's length."""


class PageTableFields(Fields):
    sequences: Ids
    layer: Count = 0

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.sequences)


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


def check_new(fields: CreateFields, entries: Entries, info: InfoAnswer) -> None:
    """The ids given are different, and a length is that of a fork."""
    for index, new in enumerate(fields.sequences):
        if new.length is not None and new.parent is None:
            rule = "length is that of a fork: give parent as well"
            refuse(f"sequences.{index}", new.model_dump(exclude_unset=True), rule)
    check_ids([new.id for new in fields.sequences if new.id is not None])


def check_page_table(fields: PageTableFields, entries: Entries, info: InfoAnswer) -> None:
    check_layer(fields.layer, info)
    check_ids(fields.sequences)


CREATE_SEQUENCES: Final = Operation(
    name="create_sequences",
    number=1,
    method="POST",
    path="/v1/sequences",
    summary="Make sequences, empty or forked; all or none",
    description="",
    tag="sequences",
    fields=CreateFields,
    takes=(),
    gives=(),
    answer=CreatedAnswer,
    check=check_new,
    scope="append",
    status=201,
    answer_text="The sequences, in the order given.",
)

LIST_SEQUENCES: Final = Operation(
    name="list_sequences",
    number=2,
    method="GET",
    path="/v1/sequences",
    summary="List sequences by id, a page at a time",
    description="",
    tag="sequences",
    fields=ListFields,
    takes=(),
    gives=(),
    answer=ListAnswer,
    check=unchecked,
    scope="read",
)

GET_SEQUENCE: Final = Operation(
    name="get_sequence",
    number=3,
    method="GET",
    path="/v1/sequences/{id}",
    summary="One sequence",
    description="",
    tag="sequences",
    fields=SequenceFields,
    takes=(),
    gives=(),
    answer=SequenceAnswer,
    check=unchecked,
    scope="read",
)

DELETE_SEQUENCE: Final = Operation(
    name="delete_sequence",
    number=4,
    method="DELETE",
    path="/v1/sequences/{id}",
    summary="Delete a sequence; its forks keep what they share",
    description="",
    tag="sequences",
    fields=SequenceFields,
    takes=(),
    gives=(),
    answer=None,
    check=unchecked,
    scope="append",
    status=204,
    frees=True,
    answer_text="It is gone.",
)

TRUNCATE: Final = Operation(
    name="truncate",
    number=5,
    method="POST",
    path="/v1/sequences/{id}/truncate",
    summary="Keep a sequence's first tokens, at every layer",
    description="",
    tag="sequences",
    fields=TruncateFields,
    takes=(),
    gives=(),
    answer=SequenceAnswer,
    check=unchecked,
    scope="append",
    frees=True,
)

PAGE_TABLE: Final = Operation(
    name="page_table",
    number=6,
    method="POST",
    path="/v1/page-table",
    summary="The CSR page table of sequences, and their cascade levels",
    description="",
    tag="sequences",
    fields=PageTableFields,
    takes=(),
    gives=(),
    answer=PageTableAnswer,
    check=check_page_table,
    scope="read",
)
