"""Operations on sequences themselves: make, list, show, cut, delete, and their page tables."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from service.operations.schema.fields import (
    Count,
    Counts,
    Entries,
    Epoch,
    Fields,
    Ids,
    Indptr,
    SequenceId,
    check_ids,
    check_indptr,
    check_layer,
    int32,
    refuse,
)
from service.operations.schema.info import InfoAnswer
from service.operations.schema.page_names import (
    NAMES,
    CacheSalt,
    NamedPages,
    PageKey,
    Seconds,
    check_names_given,
    given_names,
)
from service.operations.schema.spec import Operation

MAX_NEW: Final = 65536
MAX_LISTED: Final = 1000
MAX_RANKS: Final = 1024
MAX_BATCH: Final = 512
"""Sequences that one call cuts or commits: they have one turn."""
MAX_KEPT: Final = 65536
"""Tokens that one call moves up."""
PLAIN: Final = frozenset({"id", "parent", "ttl_s"})
"""Fields of a new sequence that go with each other in any way."""


class ShardFields(Fields):
    """Which pages of a sequence are an engine's: page i is rank i mod `ranks`'s."""

    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]


class ShardAnswer(ShardFields):
    """What an engine knows of the sequence that it has a part of."""

    epoch: Epoch
    """As it was claimed last; 0: never."""
    lengths: Counts
    """kv_len per layer of the whole sequence."""


class HeldFields(Fields):
    """A page of the prefix cache."""

    page_key: PageKey
    cache_salt: CacheSalt = ""


class NewSequenceFields(Fields):
    """One sequence to make: empty, or a fork of `parent`."""

    id: SequenceId | None = None
    """Made by the service when absent."""
    parent: SequenceId | None = None
    """Fork this sequence: share its full pages, copy the rows of a partial last one."""
    length: Count | None = None
    """Fork at this many tokens; all of the parent's when absent."""
    prefix: NamedPages | None = None
    """Begin with the longest part of this prompt that is cached. It may be empty when the tensor
    `token_ids` or `page_keys` names the pages."""
    held: HeldFields | None = None
    """Begin with a page that a pin or a lease holds, and all before it; also where the engine takes
    no new sequences. So that another engine can import them."""
    ttl_s: Seconds | None = None
    """Delete it when it has not been used for so many seconds; absent: never."""
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """Deal its pages out over so many engines of a cluster, page i to rank i mod `ranks`. A fork is
    dealt out as its parent is."""
    shard: ShardFields | None = None
    """For those who deal pages out themselves: keep these of a sequence's pages only. Requests then
    need `offsets`, and count in tokens of the whole sequence; answers tell what is held. Needs the
    scope `move`."""
    epoch: Epoch | None = None
    """With `shard`: the epoch that it begins in. Of a fork of a shard: its parent's, which the fork
    gets too. Absent: 0, which is none."""


class CreateFields(Fields):
    sequences: Annotated[
        list[NewSequenceFields], Field(min_length=1, max_length=MAX_NEW, fail_fast=True)
    ]
    """All are made, or none."""
    prefix_indptr: Indptr | None = None
    """Which ids or keys of the tensor are whose: prefix sums over the sequences. May be absent for
    a single one."""

    @property
    def is_for_shards(self) -> bool:
        return any(new.is_for_shards for new in self.sequences)


class ListFields(Fields):
    after: SequenceId | None = None
    """List those after this id; absent: from the start."""
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 100
    """At most so many."""


class SequenceFields(Fields):
    """One sequence, named by the path."""

    id: SequenceId


class DeleteFields(Fields):
    ids: (
        Annotated[list[SequenceId], Field(fail_fast=True, json_schema_extra={"uniqueItems": True})]
        | None
    ) = None
    """Those that are unknown are passed over."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{0,128}$")] | None = None
    """All sequences whose id begins like this."""
    skip: bool = False
    """Leave those that other engines have to do with as well, and name them in `skipped`: parts of
    sequences, in an epoch, and what is on its way to another engine."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.ids or ())


class DeletedAnswer(Fields):
    num_deleted: Count
    skipped: list[SequenceId] | None = None
    """With `skip`: what was left, the first thousand by id."""


class TruncateFields(Fields):
    id: SequenceId
    length: Count
    """Tokens to keep, at every layer; at most the sequence's length."""
    keep: Annotated[Counts, Field(max_length=MAX_KEPT)] | None = None
    """Tokens behind `length` to keep as well, in rising order, counted from the sequence's start.
    They move up to follow `length`, such as the accepted path of a tree of drafts."""
    layer: Count | None = None
    """Cut this layer alone, to take a part of an append back: no further than to what the sequence
    shares with others."""
    epoch: Epoch | None = None
    """Of a shard that was claimed: its epoch, or a later one that begins with this."""


class TruncateSequencesFields(Fields):
    sequences: Annotated[Ids, Field(max_length=MAX_BATCH)]
    """All are cut, or none."""
    lengths: Annotated[Counts, Field(min_length=1)]
    """Tokens of each sequence to keep, at every layer."""
    keep: Annotated[Counts, Field(max_length=MAX_KEPT)] | None = None
    """Tokens behind each length to keep as well, in rising order, counted from the start of the
    sequence. They move up to follow its length."""
    keep_indptr: Indptr | None = None
    """int32 [B+1], with `keep`: sequence b keeps `keep[keep_indptr[b]:keep_indptr[b+1]]`."""

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.sequences)


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
    ttl_s: float | None
    """Seconds that it lives unused; null: for good."""
    shard: ShardAnswer | None = None
    """Which of its pages these are, where they are not all."""


class TruncatedAnswer(Fields):
    sequences: list[SequenceAnswer]
    """In the order of the request."""


class CreatedSequenceAnswer(SequenceAnswer):
    cached_len: Count
    """Tokens that were found in the prefix cache; the rest of the prompt is the caller's to add."""


class CreatedAnswer(Fields):
    sequences: list[CreatedSequenceAnswer]


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
    """The ids given are different, a length is that of a fork, and every prefix names pages."""
    for index, new in enumerate(fields.sequences):
        if new.model_fields_set <= PLAIN:
            continue
        if new.length is not None and new.parent is None:
            rule = "length is that of a fork: give parent as well"
            refuse(f"sequences.{index}", new.model_dump(exclude_unset=True), rule)
        if new.prefix is not None and new.parent is not None:
            refuse(f"sequences.{index}", new.id, "give parent or prefix, not both")
        if new.held is not None and (new.parent is not None or new.prefix is not None):
            refuse(f"sequences.{index}.held", "given", "goes without parent and prefix")
        check_shard(f"sequences.{index}", new)
    check_ids([new.id for new in fields.sequences if new.id is not None])
    check_prefixes(fields, entries)


def check_shard(field: str, new: NewSequenceFields) -> None:
    """Dealt out or a shard, and empty at first: the cache's pages are one engine's."""
    for name, given in (("ranks", new.ranks), ("shard", new.shard)):
        if given is None:
            continue
        if new.parent is not None:
            refuse(f"{field}.{name}", "given", "a fork has its parent's: leave it out")
        if new.prefix is not None or new.held is not None:
            refuse(f"{field}.{name}", "given", "the prefix cache is of whole sequences: no prefix")
    if new.shard is not None and (new.ranks is not None or new.shard.rank >= new.shard.ranks):
        rule = "must be below ranks, which is given there alone"
        refuse(f"{field}.shard.rank", new.shard.rank, rule)
    if new.epoch is not None and new.shard is None and new.parent is None:
        refuse(f"{field}.epoch", new.epoch, "is that of a shard or of a fork: give one of them")


def check_prefixes(fields: CreateFields, entries: Entries) -> None:
    """Prefixes are named in the fields, or all of them by one tensor."""
    begun = [new.prefix for new in fields.sequences if new.prefix is not None]
    if not entries:
        if fields.prefix_indptr is not None:
            refuse("prefix_indptr", "given", "counts rows of a tensor: give token_ids or page_keys")
        for prefix in begun:
            check_names_given(prefix, entries)
        return
    for prefix in begun:
        if given := given_names(prefix, {}):
            refuse(given[0], "given", "a tensor names the pages of every prefix: leave it out")
    if len(entries) > 1:
        refuse("tensors.page_keys", "given", "give either token_ids or page_keys")
    (entry,) = entries.values()
    if fields.prefix_indptr is not None:
        sums = int32(fields.prefix_indptr)
        check_indptr("prefix_indptr", sums, entry.shape[0], len(fields.sequences))
        for index in np.flatnonzero(np.diff(sums)).tolist():
            if fields.sequences[index].prefix is None:
                refuse(f"sequences.{index}", None, "has rows of the tensor: give prefix = {}")
    elif len(fields.sequences) > 1:
        refuse("prefix_indptr", None, "must be given for more than one sequence")
    elif not begun:
        refuse("sequences.0", None, "has a tensor for its prefix: give prefix = {}")


def check_delete(fields: DeleteFields, entries: Entries, info: InfoAnswer) -> None:
    if (fields.ids is None) == (fields.prefix is None):
        refuse("ids", None, "give either ids or prefix")
    check_ids(fields.names, "ids")


def check_truncate(fields: TruncateFields, entries: Entries, info: InfoAnswer) -> None:
    if fields.layer is not None:
        check_layer(fields.layer, info)
        if fields.keep is not None:
            refuse("keep", "given", "goes with a cut of every layer: leave layer out")


def check_truncates(fields: TruncateSequencesFields, entries: Entries, info: InfoAnswer) -> None:
    check_ids(fields.sequences)
    batch = len(fields.sequences)
    if len(fields.lengths) != batch:
        refuse("lengths", f"{len(fields.lengths)} numbers", f"must be {batch}, one per sequence")
    if fields.keep is None:
        if fields.keep_indptr is not None:
            refuse("keep_indptr", "given", "goes with keep: leave it out")
    elif fields.keep_indptr is None:
        refuse("keep_indptr", None, "must be given with keep")
    else:
        check_indptr("keep_indptr", int32(fields.keep_indptr), len(fields.keep), batch)


def check_page_table(fields: PageTableFields, entries: Entries, info: InfoAnswer) -> None:
    check_layer(fields.layer, info)
    check_ids(fields.sequences)


def new_moves(fields: CreateFields) -> str:
    """What makes a part of a sequence, whose other parts other engines have."""
    return "shard" if any(new.shard is not None for new in fields.sequences) else ""


CREATE_SEQUENCES: Final = Operation(
    name="create_sequences",
    number=1,
    method="POST",
    path="/v1/sequences",
    summary="Make sequences, empty, forked or from the prefix cache; all or none",
    tag="sequences",
    fields=CreateFields,
    takes=NAMES,
    answer=CreatedAnswer,
    check=check_new,
    scope="append",
    moved_with=new_moves,
    status=201,
    answer_text="The sequences, in the order given.",
    example={"sequences": [{"id": "chat-1", "prefix": {"token_ids": [11, 12, 13, 14]}}]},
    routing="placed",
)

LIST_SEQUENCES: Final = Operation(
    name="list_sequences",
    number=2,
    method="GET",
    path="/v1/sequences",
    summary="List sequences by id, a page at a time",
    tag="sequences",
    fields=ListFields,
    answer=ListAnswer,
    scope="read",
    routing="everywhere",
)

GET_SEQUENCE: Final = Operation(
    name="get_sequence",
    number=3,
    method="GET",
    path="/v1/sequences/{id}",
    summary="One sequence",
    tag="sequences",
    fields=SequenceFields,
    answer=SequenceAnswer,
    scope="read",
)

DELETE_SEQUENCE: Final = Operation(
    name="delete_sequence",
    number=4,
    method="DELETE",
    path="/v1/sequences/{id}",
    summary="Delete a sequence; its forks keep what they share, committed pages stay cached",
    tag="sequences",
    fields=SequenceFields,
    answer=None,
    scope="append",
    status=204,
    frees=True,
    answer_text="It is gone.",
)

DELETE_SEQUENCES: Final = Operation(
    name="delete_sequences",
    number=26,
    method="POST",
    path="/v1/sequences/delete",
    summary="Delete many sequences, by id or by how their ids begin",
    tag="sequences",
    fields=DeleteFields,
    answer=DeletedAnswer,
    check=check_delete,
    scope="append",
    frees=True,
    routing="everywhere",
)

TRUNCATE: Final = Operation(
    name="truncate",
    number=5,
    method="POST",
    path="/v1/sequences/{id}/truncate",
    summary="Keep a sequence's first tokens, at every layer",
    tag="sequences",
    fields=TruncateFields,
    answer=SequenceAnswer,
    scope="append",
    check=check_truncate,
    frees=True,
)

TRUNCATE_SEQUENCES: Final = Operation(
    name="truncate_sequences",
    number=39,
    method="POST",
    path="/v1/sequences/truncate",
    summary="Keep the first tokens of many sequences, at every layer; all or none",
    description="With `keep`, chosen tokens behind each length stay as well and move up.",
    tag="sequences",
    fields=TruncateSequencesFields,
    answer=TruncatedAnswer,
    scope="append",
    check=check_truncates,
    frees=True,
    example={"sequences": ["chat-1", "chat-2"], "lengths": [0, 0]},
)

PAGE_TABLE: Final = Operation(
    name="page_table",
    number=6,
    method="POST",
    path="/v1/page-table",
    summary="The CSR page table of sequences, and their cascade levels",
    tag="sequences",
    fields=PageTableFields,
    answer=PageTableAnswer,
    check=check_page_table,
    scope="read",
    routing="together",
)
