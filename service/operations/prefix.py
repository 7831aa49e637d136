"""Operations on the prefix cache: match, commit, leases, pins, evict, clear, and quotas."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

from pydantic import Field

from service.operations.schema.fields import (
    Count,
    Counts,
    Entries,
    Fields,
    Ids,
    Indptr,
    NoFields,
    Offsets,
    SequenceId,
    check_ids,
    check_indptr,
    check_offsets,
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
)
from service.operations.schema.spec import Operation
from service.operations.sequences import MAX_BATCH

DEFAULT_LEASE_S: Final = 10.0
MAX_LEASE_S: Final = 3600.0
MAX_HOLDS: Final = 1000
MAX_COMMITTED_PAGES: Final = 8192
"""Pages that one call commits in many sequences: they have one turn."""
LEASE_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,64}$"
NAMESPACE_PATTERN: Final = r"^[A-Za-z0-9._-]{1,64}$"

LeaseId = Annotated[str, Field(pattern=LEASE_PATTERN)]
LeaseSeconds = Annotated[float, Field(ge=0.0, le=MAX_LEASE_S)]
Priority = Annotated[int, Field(ge=1, le=100)]
NamespaceName = Annotated[str, Field(pattern=NAMESPACE_PATTERN)]


class MatchFields(NamedPages):
    lease_s: LeaseSeconds = DEFAULT_LEASE_S
    """Seconds for which what was found is not evicted; 0 takes no lease."""


class LeaseAnswer(Fields):
    id: LeaseId
    expires_at: float
    """Seconds since the epoch; then the lease ends by itself."""


class MatchAnswer(Fields):
    matched_len: Count
    """Tokens that are cached, in whole pages."""
    num_pages: Count
    lease: LeaseAnswer | None
    """Null when none was asked for, nothing was found, or the engine is being emptied."""


class CommitFields(NamedPages):
    id: SequenceId
    offset: Count = 0
    """Tokens of the sequence that are committed already, in whole pages: `token_ids` or `page_keys`
    begin behind them."""
    priority: Priority | None = None
    """Pages of lower priority are evicted first; 35 when nobody says otherwise. A page keeps the
    highest that a commit gave it."""
    duration_s: Seconds | None = None
    """Seconds for which the priority holds; then it is 35 again."""


class CommitAnswer(Fields):
    committed_len: Count
    """Tokens of the sequence that are committed, as far as this request named them."""
    num_pages: Count
    last_key: PageKey | None
    """The key of the last of these pages: what a pin names."""


class CommitSequencesFields(NamedPages):
    sequences: Annotated[Ids, Field(max_length=MAX_BATCH)]
    """All are committed, or none."""
    names_indptr: Indptr
    """int32 [B+1]: the token ids or page keys of sequence b are those from `names_indptr[b]` to
    before `names_indptr[b+1]`."""
    offsets: Offsets | None = None
    """Tokens of each sequence that are committed already, in whole pages: its token ids or page
    keys begin behind them. Absent: 0 for all."""
    priority: Priority | None = None
    """As in a commit of one sequence."""
    duration_s: Seconds | None = None
    """As in a commit of one sequence."""

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.sequences)


class CommittedAnswer(Fields):
    """Numbers for each sequence, in the order of the request."""

    committed_lens: Counts
    """Tokens that are committed, as far as this request named them."""
    num_pages: Counts
    last_keys: list[PageKey | None]
    """The key of the last of these pages."""


class RenewFields(Fields):
    id: LeaseId
    lease_s: Annotated[float, Field(gt=0.0, le=MAX_LEASE_S)] = DEFAULT_LEASE_S
    """Seconds from now."""
    page_key: PageKey | None = None
    """Where the lease is not known, open it on this page and all before it: another engine gave
    it."""
    cache_salt: CacheSalt = ""
    """With `page_key`: the salt it was committed with."""


class LeaseFields(Fields):
    """One lease, named by the path."""

    id: LeaseId


class PinFields(Fields):
    page_key: PageKey
    """Pins this page and all before it."""
    cache_salt: CacheSalt = ""
    """The salt it was committed with."""
    soft_ttl_s: Seconds | None = None
    """For so long they are evicted only when nothing else can be."""
    hard: bool = False
    """They are never evicted, until the pin is taken away."""


class UnpinFields(Fields):
    page_key: PageKey
    """The page that a pin named."""
    cache_salt: CacheSalt = ""
    """The salt it was committed with."""


class PagesAnswer(Fields):
    num_pages: Count


class EvictFields(Fields):
    num_pages: Count
    """At most so many."""


class HeldAnswer(Fields):
    """What holds a page and all before it without a sequence."""

    lease: LeaseId | None
    """Null: a hard pin."""
    left_s: float | None
    """Seconds until the lease ends; null for a pin, which does not."""
    page_key: PageKey
    cache_salt: CacheSalt
    num_pages: Count
    """The page and all before it."""


class HoldsAnswer(Fields):
    holds: list[HeldAnswer]
    """Pins before leases, a thousand at most."""


class NamespaceFields(Fields):
    """One namespace, named by the path."""

    name: NamespaceName
    """Nobody need have met it before."""


class QuotaFields(Fields):
    name: NamespaceName
    """Nobody need have met it before."""
    max_pages: Count | None = None
    """Pages that it may have at once, cached ones included; null: no limit."""
    reserved_pages: Count = 0
    """Pages that nobody else may take."""


class NamespacesAnswer(Fields):
    namespaces: list[str]


class NamespaceAnswer(Fields):
    name: NamespaceName
    max_pages: Count | None
    reserved_pages: Count
    used: Count
    """Pages in all: referenced, cached and pinned."""
    referenced: Count
    cached: Count
    pinned: Count
    leases: Count
    sequences: Count


def check_match(fields: MatchFields, entries: Entries, info: InfoAnswer) -> None:
    check_names_given(fields, entries)


def check_commit(fields: CommitFields, entries: Entries, info: InfoAnswer) -> None:
    check_names_given(fields, entries)
    check_offset("offset", fields.offset, info)
    check_duration(fields)


def check_offset(field: str, offset: int, info: InfoAnswer) -> None:
    if offset % info.page_size:
        refuse(field, offset, f"must be a multiple of page_size = {info.page_size}")


def check_commits(fields: CommitSequencesFields, entries: Entries, info: InfoAnswer) -> None:
    check_ids(fields.sequences)
    (name,) = check_names_given(fields, entries)
    batch = len(fields.sequences)
    given = entries[name].shape[0] if name in entries else len(getattr(fields, name))
    check_indptr("names_indptr", int32(fields.names_indptr), given, batch)
    check_offsets(fields.offsets, batch)
    for at, offset in enumerate(fields.offsets or ()):
        check_offset(f"offsets.{at}", offset, info)
    pages = given if name == "page_keys" else given // info.page_size
    if pages > MAX_COMMITTED_PAGES:
        rule = f"at most {MAX_COMMITTED_PAGES} pages in a call: commit fewer sequences at a time"
        refuse(name, f"{pages} pages", rule)
    check_duration(fields)


def check_duration(fields: CommitFields | CommitSequencesFields) -> None:
    if fields.duration_s is not None and fields.priority is None:
        refuse("duration_s", fields.duration_s, "is that of a priority: give priority as well")


def check_pin(fields: PinFields, entries: Entries, info: InfoAnswer) -> None:
    if fields.hard == (fields.soft_ttl_s is not None):
        refuse("soft_ttl_s", fields.soft_ttl_s, "give either soft_ttl_s or hard = true")


MATCH: Final = Operation(
    name="match_prefix",
    number=16,
    method="POST",
    path="/v1/prefix/match",
    summary="The longest cached beginning of a prompt, held for a while",
    tag="prefix cache",
    fields=MatchFields,
    takes=NAMES,
    answer=MatchAnswer,
    check=check_match,
    scope="read",
    example={"token_ids": [11, 12, 13, 14]},
    routing="everywhere",
)

COMMIT: Final = Operation(
    name="commit",
    number=17,
    method="POST",
    path="/v1/sequences/{id}/commit",
    summary="Name a sequence's full pages, so that they outlive it and are found again",
    description="Pages count that are full at every layer. Where pages of those names are cached "
    "already, the sequence moves onto them and its own go free. Committing again changes nothing.",
    tag="prefix cache",
    fields=CommitFields,
    takes=NAMES,
    answer=CommitAnswer,
    check=check_commit,
    scope="append",
    example={"token_ids": [11, 12, 13, 14], "priority": 80, "duration_s": 600.0},
)

COMMIT_SEQUENCES: Final = Operation(
    name="commit_sequences",
    number=40,
    method="POST",
    path="/v1/sequences/commit",
    summary="Name full pages of many sequences; all or none",
    description="As a commit of one sequence, for each of them.",
    tag="prefix cache",
    fields=CommitSequencesFields,
    takes=NAMES,
    answer=CommittedAnswer,
    check=check_commits,
    scope="append",
    example={
        "sequences": ["chat-1", "chat-2"],
        "token_ids": [11, 12, 13, 14],
        "names_indptr": [0, 2, 4],
    },
)

RENEW_LEASE: Final = Operation(
    name="renew_lease",
    number=18,
    method="POST",
    path="/v1/leases/{id}",
    summary="Let a lease end later",
    tag="prefix cache",
    fields=RenewFields,
    answer=LeaseAnswer,
    scope="read",
    routing="lease",
)

RELEASE_LEASE: Final = Operation(
    name="release_lease",
    number=19,
    method="DELETE",
    path="/v1/leases/{id}",
    summary="End a lease",
    tag="prefix cache",
    fields=LeaseFields,
    answer=None,
    scope="read",
    status=204,
    frees=True,
    answer_text="It is gone.",
    routing="lease",
)

PIN: Final = Operation(
    name="pin",
    number=20,
    method="PUT",
    path="/v1/prefix/pin",
    summary="Keep a page, and all before it, from being evicted",
    description="A soft pin ends by itself, a hard one when it is taken away.",
    tag="prefix cache",
    fields=PinFields,
    answer=PagesAnswer,
    check=check_pin,
    scope="append",
    answer_text="How many pages the pin covers.",
    routing="everywhere",
)

UNPIN: Final = Operation(
    name="unpin",
    number=21,
    method="DELETE",
    path="/v1/prefix/pin",
    summary="Take the pins of a page away, hard and soft",
    tag="prefix cache",
    fields=UnpinFields,
    answer=None,
    scope="append",
    status=204,
    frees=True,
    answer_text="They are gone.",
    routing="everywhere",
)

HOLDS: Final = Operation(
    name="holds",
    number=38,
    method="GET",
    path="/v1/prefix/holds",
    summary="The hard pins and leases that there are",
    tag="prefix cache",
    fields=NoFields,
    answer=HoldsAnswer,
    scope="read",
    routing="everywhere",
)

EVICT: Final = Operation(
    name="evict",
    number=22,
    method="POST",
    path="/v1/prefix/evict",
    summary="Evict cached pages, those first that would go first",
    tag="prefix cache",
    fields=EvictFields,
    answer=PagesAnswer,
    scope="append",
    frees=True,
    answer_text="How many pages were evicted.",
    routing="everywhere",
)

CLEAR: Final = Operation(
    name="clear",
    number=23,
    method="POST",
    path="/v1/prefix/clear",
    summary="Evict all that can be evicted",
    description="What sequences, leases and hard pins hold stays.",
    tag="prefix cache",
    fields=NoFields,
    answer=PagesAnswer,
    scope="append",
    frees=True,
    answer_text="How many pages were evicted.",
    routing="everywhere",
)

LIST_NAMESPACES: Final = Operation(
    name="list_namespaces",
    number=37,
    method="GET",
    path="/v1/namespaces",
    summary="The namespaces that have sequences or pages",
    tag="prefix cache",
    fields=NoFields,
    answer=NamespacesAnswer,
    scope="admin",
    routing="everywhere",
)

GET_NAMESPACE: Final = Operation(
    name="get_namespace",
    number=24,
    method="GET",
    path="/v1/namespaces/{name}",
    summary="What a namespace has, and may have",
    tag="prefix cache",
    fields=NamespaceFields,
    answer=NamespaceAnswer,
    scope="admin",
    routing="everywhere",
)

SET_NAMESPACE: Final = Operation(
    name="set_namespace",
    number=25,
    method="PUT",
    path="/v1/namespaces/{name}",
    summary="What a namespace may have",
    description="What it has beyond that already stays until it goes.",
    tag="prefix cache",
    fields=QuotaFields,
    answer=NamespaceAnswer,
    scope="admin",
    routing="everywhere",
)
