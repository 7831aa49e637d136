"""Operations on sequences: create, list, get, truncate, and delete."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Annotated, Final

import numpy as np
from attnd.wire.bounds import MAX_BATCH, MAX_DELETED, MAX_KEPT, MAX_NEW
from pydantic import Field

from service.operations.schema.fields import (
    Count,
    Counts,
    Entries,
    Fields,
    Ids,
    Indptr,
    InfoAnswer,
    NamingFields,
    SequenceId,
    TokenId,
    check_ids,
    check_ids_given,
    check_indptr,
    check_layer,
    check_one_each,
    int32,
    refuse,
)
from service.operations.schema.page_names import (
    NAMES,
    Seconds,
    SoughtPages,
    check_extra,
    check_num_names,
    check_prompt,
    given_names,
)
from service.operations.schema.spec import Operation

MAX_LISTED: Final = 1000
PLAIN: Final = frozenset({"id", "parent", "ttl_s", "reserve"})
"""Fields of a new sequence that can be combined in any way."""


class NewSequenceFields(Fields):
    """A sequence to create: empty, a fork of `parent`, or from the prefix cache."""

    id: SequenceId | None = None
    """Id; absent: the service generates one."""
    parent: SequenceId | None = None
    """Sequence to fork: its full pages are shared, the rows of a partial last page copied."""
    length: Count | None = None
    """Tokens of the parent to keep; absent: all."""
    prefix: SoughtPages | None = None
    """Prompt whose longest cached beginning the sequence starts with. Empty if the tensor
    `token_ids` or `page_keys` names the pages."""
    ttl_s: Seconds | None = None
    """Idle seconds before deletion; absent: never."""
    reserve: Count = 0
    """Tokens to keep pages for, behind those that it begins with. Until they are written, released
    by a truncation or deleted with the sequence, no other can have these pages."""


class CreateFields(Fields):
    sequences: Annotated[
        list[NewSequenceFields], Field(min_length=1, max_length=MAX_NEW, fail_fast=True)
    ]
    """Sequences to create; all or none."""
    prefix_indptr: Indptr | None = None
    """int32 [B+1]: sequence b has the ids or keys `prefix_indptr[b]:prefix_indptr[b+1]` of the
    tensor. Optional for one sequence."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """Ids are distinct, only forks have a length, and every prefix names pages."""
        for index, new in enumerate(self.sequences):
            if new.model_fields_set <= PLAIN:
                continue
            if new.length is not None and new.parent is None:
                rule = "length requires parent"
                refuse(f"sequences.{index}", new.model_dump(exclude_unset=True), rule)
            if new.prefix is not None and new.parent is not None:
                refuse(f"sequences.{index}", new.id, "parent and prefix cannot be combined")
        check_ids([new.id for new in self.sequences if new.id is not None])
        check_prefixes(self, entries, info)


class ListFields(Fields):
    after: SequenceId | None = None
    """Id after which the list starts; absent: from the first."""
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 100
    """Maximum number of sequences in the reply."""


class SequenceFields(Fields):
    """The sequence named by the path."""

    id: SequenceId


class DeleteFields(Fields):
    ids: (
        Annotated[
            list[SequenceId],
            Field(max_length=MAX_DELETED, fail_fast=True, json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = None
    """Ids of the sequences; unknown ids are ignored."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{0,128}$")] | None = None
    """Prefix of the ids of the sequences."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.ids or ())

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        if (self.ids is None) == (self.prefix is None):
            given = None if self.ids is None else "ids and prefix"
            refuse("ids", given, "give either ids or prefix")
        check_ids(self.names, "ids")


class TruncateFields(Fields):
    id: SequenceId
    length: Count
    """Tokens to keep at every layer; at most the sequence's length."""
    keep: Annotated[Counts, Field(max_length=MAX_KEPT)] | None = None
    """Positions after `length` of further tokens to keep, ascending, such as the accepted path of a
    tree of drafts. They move up to follow `length`."""
    layer: Count | None = None
    """Layer to truncate alone, to undo a part of an append; not within pages shared with other
    sequences. Absent: every layer."""
    reserve: Count | None = None
    """Lowers the sequence's reserve to at most that number of tokens behind its new length; 0
    releases it. Absent: it stays, and tokens that are cut can be written again."""
    token_ids: Annotated[list[TokenId], Field(max_length=MAX_KEPT, fail_fast=True)] | None = None
    """Ids of the tokens that it has then, from `known_len` on, but at most from `length` on."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        if self.layer is not None:
            check_layer(self.layer, info)
            for name in ("keep", "reserve", "token_ids"):
                if getattr(self, name) is not None:
                    refuse(name, "given", "goes with a cut of every layer: leave layer out")


class TruncateSequencesFields(NamingFields):
    sequences: Annotated[Ids, Field(max_length=MAX_BATCH)]
    """Sequences to truncate; all or none."""
    lengths: Annotated[Counts, Field(min_length=1)]
    """Tokens of each sequence to keep, at every layer."""
    keep: Annotated[Counts, Field(max_length=MAX_KEPT)] | None = None
    """Positions after each length of further tokens to keep, ascending. They move up to follow that
    length."""
    keep_indptr: Indptr | None = None
    """int32 [B+1], with `keep`: sequence b keeps `keep[keep_indptr[b]:keep_indptr[b+1]]`."""
    reserve: Count | None = None
    """Lowers the reserve of each, as in a truncation of one."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_ids(self.sequences)
        batch = len(self.sequences)
        check_one_each("lengths", self.lengths, batch)
        check_ids_given(self, {}, len(self.keep or ()), batch)
        if self.token_ids is not None and self.ids_indptr is None:
            refuse("ids_indptr", None, "must be given with token_ids")
        if self.keep is None:
            if self.keep_indptr is not None:
                refuse("keep_indptr", "given", "goes with keep: leave it out")
        elif self.keep_indptr is None:
            refuse("keep_indptr", None, "must be given with keep")
        else:
            check_indptr("keep_indptr", int32(self.keep_indptr), len(self.keep), batch)


def check_prefixes(fields: CreateFields, entries: Entries, info: InfoAnswer) -> None:
    """Either the fields name the prefixes, or one tensor names all of them."""
    begun = {at: new.prefix for at, new in enumerate(fields.sequences) if new.prefix is not None}
    if not entries:
        if fields.prefix_indptr is not None:
            refuse("prefix_indptr", "given", "counts rows of a tensor: give token_ids or page_keys")
        for at, prefix in begun.items():
            check_prompt(prefix, entries, info, f"sequences.{at}.prefix.")
        return
    for prefix in begun.values():
        if given := given_names(prefix, {}):
            refuse(given[0], "given", "a tensor names the pages of every prefix: leave it out")
    if len(entries) > 1:
        refuse("tensors.page_keys", "given", "give either token_ids or page_keys")
    ((name, entry),) = entries.items()
    check_num_names(name, entry.shape[0])
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
    ends = fields.prefix_indptr or [0, entry.shape[0]]
    for at, prefix in begun.items():
        if prefix.extra is not None:
            field, count = f"sequences.{at}.prefix.extra", ends[at + 1] - ends[at]
            check_extra(field, prefix.extra, next(iter(entries)), count, info.page_size)


operation = partial(Operation, tag="sequences")

CREATE_SEQUENCES: Final = operation(
    name="create_sequences",
    summary="Create sequences: empty, forked or from the prefix cache; all or none",
    fields=CreateFields,
    takes=NAMES,
    scope="append",
    status=201,
    answer_text="The sequences, in the order of the request.",
    routing="placed",
)

LIST_SEQUENCES: Final = operation(
    name="list_sequences",
    summary="List sequences by id, a page at a time",
    fields=ListFields,
    scope="read",
    routing="everywhere",
)

GET_SEQUENCE: Final = operation(
    name="get_sequence",
    summary="One sequence",
    fields=SequenceFields,
    scope="read",
)

DELETE_SEQUENCE: Final = operation(
    name="delete_sequence",
    summary="Delete a sequence; its forks keep shared pages, and committed pages stay cached",
    fields=SequenceFields,
    scope="append",
    frees=True,
    answer_text="Deleted.",
)

DELETE_SEQUENCES: Final = operation(
    name="delete_sequences",
    summary="Delete many sequences, by ids or by a prefix of their ids",
    fields=DeleteFields,
    scope="append",
    frees=True,
    routing="everywhere",
)

TRUNCATE: Final = operation(
    name="truncate",
    summary="Truncate a sequence to its first tokens, at every layer",
    fields=TruncateFields,
    scope="append",
    frees=True,
)

TRUNCATE_SEQUENCES: Final = operation(
    name="truncate_sequences",
    summary="Truncate many sequences to their first tokens, at every layer; all or none",
    description="With `keep`, chosen tokens after each length are kept as well and move up.",
    fields=TruncateSequencesFields,
    scope="append",
    frees=True,
)
