"""Operations on the prefix cache: match, commit, leases, pins, and eviction."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from attnd.wire.bounds import MAX_BATCH
from pydantic import Field

from service.operations.schema.fields import (
    BatchFields,
    Count,
    Entries,
    Fields,
    Ids,
    Indptr,
    InfoAnswer,
    NoFields,
    Offsets,
    SequenceId,
    check_ids,
    check_indptr,
    check_one_each,
    int32,
    refuse,
)
from service.operations.schema.page_names import (
    NAMES,
    CacheSalt,
    ExtraKeys,
    PageKey,
    PageNames,
    PromptNames,
    Seconds,
    SoughtPages,
    check_extra,
    check_names_given,
    check_num_names,
    check_prompt,
    num_given,
)
from service.operations.schema.spec import Operation

DEFAULT_LEASE_S: Final = 10.0
MAX_LEASE_S: Final = 3600.0
MAX_HOLDS: Final = 1000
MAX_COMMITTED_PAGES: Final = 8192
"""Maximum pages that one call commits in many sequences, within one turn of the engine."""
LEASE_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,64}$"

LeaseId = Annotated[str, Field(pattern=LEASE_PATTERN)]
LeaseSeconds = Annotated[float, Field(ge=0.0, le=MAX_LEASE_S)]
Priority = Annotated[int, Field(ge=1, le=100)]


class MatchFields(SoughtPages):
    lease_s: LeaseSeconds = DEFAULT_LEASE_S
    """Duration of the lease on the matched pages, in seconds; 0: no lease, and pages in other tiers
    than the pool are counted and not loaded."""


class PrefetchFields(SoughtPages):
    pass


class CommitFields(PromptNames):
    id: SequenceId
    offset: Count = 0
    """Committed tokens, in full pages, after which `token_ids` or `page_keys` start."""
    priority: Priority | None = None
    """Eviction priority: lower ones are evicted first; absent: 35. A page keeps the highest one
    that a commit gave it."""
    duration_s: Seconds | None = None
    """Seconds until the priority returns to 35; absent: never."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_prompt(self, entries, info)
        check_offset("offset", self.offset, info)
        check_duration(self)


class CommitSequencesFields(BatchFields, PageNames):
    sequences: Annotated[Ids, Field(max_length=MAX_BATCH)]
    """Sequences to commit; all or none."""
    names_indptr: Indptr
    """int32 [B+1]: sequence b has the token ids or page keys
    `names_indptr[b]:names_indptr[b+1]`."""
    offsets: Offsets | None = None
    """Committed tokens of each sequence, in full pages, after which its token ids or page keys
    start. Absent: 0 for all."""
    extra: Annotated[list[ExtraKeys], Field(fail_fast=True)] | None = None
    """Further keys of each sequence, as in a commit of one; their tokens count from its first in
    this request."""
    priority: Priority | None = None
    """Eviction priority, as in a commit of one sequence."""
    duration_s: Seconds | None = None
    """Seconds until the priority returns to 35; absent: never."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_ids(self.sequences)
        (name,) = check_names_given(self, entries)
        batch = len(self.sequences)
        given, sums = num_given(self, name, entries), self.names_indptr
        check_num_names(name, given)
        check_indptr("names_indptr", int32(sums), given, batch)
        check_one_each("offsets", self.offsets, batch)
        check_one_each("extra", self.extra, batch)
        for at, extra in enumerate(self.extra or ()):
            check_extra(f"extra.{at}", extra, name, sums[at + 1] - sums[at], info.page_size)
        for at, offset in enumerate(self.offsets or ()):
            check_offset(f"offsets.{at}", offset, info)
        pages = given if name == "page_keys" else given // info.page_size
        if pages > MAX_COMMITTED_PAGES:
            rule = f"at most {MAX_COMMITTED_PAGES} pages per call: commit fewer sequences at a time"
            refuse(name, f"{pages} pages", rule)
        check_duration(self)


class RenewFields(Fields):
    id: LeaseId
    lease_s: Annotated[float, Field(gt=0.0, le=MAX_LEASE_S)] = DEFAULT_LEASE_S
    """New duration from now, in seconds."""


class LeaseFields(Fields):
    """The lease named by the path."""

    id: LeaseId


class PinFields(Fields):
    page_key: PageKey
    """Page to pin, with all before it."""
    cache_salt: CacheSalt = ""
    """Salt that it was committed with."""
    soft_ttl_s: Seconds | None = None
    """Duration of a soft pin, in seconds: the pages are evicted after all unpinned ones."""
    hard: bool = False
    """Whether the pin is hard: the pages are not evicted until it is removed."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        if self.hard == (self.soft_ttl_s is not None):
            refuse("soft_ttl_s", self.soft_ttl_s, "give either soft_ttl_s or hard = true")


class UnpinFields(Fields):
    page_key: PageKey
    """Page of the pin."""
    cache_salt: CacheSalt = ""
    """Salt that it was committed with."""


class EvictFields(Fields):
    num_pages: Count
    """Maximum number of pages to evict."""


def check_offset(field: str, offset: int, info: InfoAnswer) -> None:
    if offset % info.page_size:
        refuse(field, offset, f"must be a multiple of page_size = {info.page_size}")


def check_duration(fields: CommitFields | CommitSequencesFields) -> None:
    if fields.duration_s is not None and fields.priority is None:
        refuse("duration_s", fields.duration_s, "requires priority")


operation = partial(Operation, tag="prefix cache")

MATCH: Final = operation(
    name="match_prefix",
    summary="Find the longest cached beginning of a prompt, and lease it",
    fields=MatchFields,
    takes=NAMES,
    scope="read",
    routing="everywhere",
)

PREFETCH: Final = operation(
    name="prefetch",
    summary="Load the longest cached beginning of a prompt into the pool",
    description="Pages in host memory or on disk are verified and loaded until shortly before the "
    "deadline. They are cached then, and can be evicted.",
    fields=PrefetchFields,
    takes=NAMES,
    scope="read",
    routing="everywhere",
)

COMMIT: Final = operation(
    name="commit",
    summary="Commit a sequence's full pages, so that they stay cached and can be found",
    description="Only pages that are full at every layer are committed. If pages of the same names "
    "are cached, the sequence moves onto them and its own become free. A repeated commit changes "
    "nothing.",
    fields=CommitFields,
    takes=NAMES,
    scope="append",
)

COMMIT_SEQUENCES: Final = operation(
    name="commit_sequences",
    summary="Commit full pages of many sequences; all or none",
    description="Works like a commit of one sequence, for each of them.",
    fields=CommitSequencesFields,
    takes=NAMES,
    scope="append",
)

RENEW_LEASE: Final = operation(
    name="renew_lease",
    summary="Extend a lease",
    fields=RenewFields,
    scope="read",
    routing="lease",
)

RELEASE_LEASE: Final = operation(
    name="release_lease",
    summary="End a lease",
    fields=LeaseFields,
    scope="read",
    frees=True,
    answer_text="Released.",
    routing="lease",
)

PIN: Final = operation(
    name="pin",
    summary="Pin a page and all before it, so that they are not evicted",
    description="A soft pin ends after `soft_ttl_s`, a hard pin when it is removed.",
    fields=PinFields,
    scope="append",
    answer_text="Number of pinned pages.",
    routing="everywhere",
)

UNPIN: Final = operation(
    name="unpin",
    summary="Remove the hard and soft pins of a page",
    fields=UnpinFields,
    scope="append",
    frees=True,
    answer_text="Removed.",
    routing="everywhere",
)

HOLDS: Final = operation(
    name="holds",
    summary="List the namespace's hard pins and leases",
    fields=NoFields,
    scope="read",
    routing="everywhere",
)

EVICT: Final = operation(
    name="evict",
    summary="Evict cached pages, in order of eviction",
    fields=EvictFields,
    scope="append",
    frees=True,
    answer_text="Number of evicted pages.",
    routing="everywhere",
)

CLEAR: Final = operation(
    name="clear",
    summary="Evict all cached pages",
    description="Pages held by sequences, leases or hard pins stay.",
    fields=NoFields,
    scope="append",
    frees=True,
    answer_text="Number of evicted pages.",
    routing="everywhere",
)
