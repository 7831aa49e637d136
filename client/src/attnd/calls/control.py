"""The calls that send no arrays: sequences, page tables, info, pool, snapshot, health, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from attnd.calls.arguments import (
    Indices,
    Int,
    instances,
    plain,
    plain_fields,
    sequence_id,
    sequence_ids,
    whole_number,
    whole_numbers,
)
from attnd.calls.call import Call, Reply, nothing, reads, settled_by
from attnd.calls.prefix import Prefix, TokenIds, indptr_of, prefix_of, row_ids
from attnd.errors import UnknownSequence
from attnd.wire.answers import (
    EngineInfo,
    Health,
    Info,
    PageTable,
    Pool,
    SequenceInfo,
    SequencePage,
    Snapshot,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewSequence:
    """`id` None: the service makes one. With `parent`, fork it at `length` (None: all of it).

    With `prefix`, begin with the cached part of it. `ttl_s`: idle seconds before deletion.
    `reserve`: tokens behind its first ones that pages are kept for.
    """

    id: str | None = None
    parent: str | None = None
    length: Int | None = None
    prefix: Prefix | None = None
    ttl_s: float | None = None
    reserve: Int | None = None

    def document(self) -> dict[str, Any]:
        given: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        if self.prefix is not None:
            given["prefix"] = prefix_of(self.prefix).sought()
        if self.ttl_s is not None:
            given["ttl_s"] = float(self.ttl_s)
        return {name: plain(value, name) for name, value in given.items() if value is not None}


def create_sequences(
    sequences: Sequence[NewSequence], *, reserve: Int | None = None
) -> Call[tuple[SequenceInfo, ...]]:
    """Make sequences, empty, forked or from the prefix cache, all or none, in the order given.

    Prefixes are named all by token ids or all by page keys. `reserve` is that of each which has
    none of its own. Raises `SequenceExists`, `UnknownSequence` (a parent), `OutOfPages` (also where
    the reserves do not fit), `InvalidRequest`.
    """
    if reserve is not None:
        given = instances(sequences, NewSequence, "sequences")
        sequences = [replace(one, reserve=reserve) if one.reserve is None else one for one in given]
    return creating(sequences, reads("create_sequences"))


def create_sequence(
    id: str | None = None,
    *,
    parent: str | None = None,
    length: Int | None = None,
    prefix: Prefix | None = None,
    ttl_s: float | None = None,
    reserve: Int | None = None,
) -> Call[SequenceInfo]:
    """`create_sequences` of one: empty, `parent` forked at `length` (None: all of it), or beginning
    with the cached part of `prefix` (`cached_len` of the result). Pages are kept for `reserve`
    tokens behind these; raises `OutOfPages` where they do not fit."""
    new = NewSequence(id, parent, length, prefix, ttl_s, reserve)
    return creating([new], lambda reply: reads("create_sequences")(reply)[0])


def creating(sequences: Sequence[NewSequence], parse: Callable[[Reply], T]) -> Call[T]:
    """With the tensor that names the pages of all prefixes."""
    sequences = instances(sequences, NewSequence, "sequences")
    fields: dict[str, Any] = {"sequences": [new.document() for new in sequences]}
    named = [{} if new.prefix is None else new.prefix.arrays() for new in sequences]
    kinds = {kind for arrays in named for kind in arrays}
    if len(kinds) > 1:
        raise ValueError("name the prefixes of one call all by token_ids or all by page_keys")
    arrays = {kind: np.concatenate([one[kind] for one in named if one]) for kind in kinds}
    if kinds and len(sequences) > 1:
        (kind,) = kinds
        fields["prefix_indptr"] = indptr_of([one.get(kind, ()) for one in named])
    # Not repeatable: a second time the ids exist, or more ids are made.
    return Call("create_sequences", parse, repeatable=False, fields=fields, arrays=arrays)


def delete_sequences(ids: Iterable[str] | None = None, *, prefix: str | None = None) -> Call[int]:
    """Delete the sequences `ids`, or all whose id begins with `prefix`; returns their number.

    Unknown ids are ignored."""
    if ids is None and prefix is None:
        raise ValueError('give ids, or prefix (prefix="" is every sequence)')
    ids = sorted(ids) if isinstance(ids, (set, frozenset)) else ids
    named = None if ids is None else sequence_ids(ids, "ids")
    fields = plain_fields({"prefix": prefix, "ids": named})
    return Call("delete_sequences", reads("delete_sequences"), fields=fields)


def sequence_page(after: str | None = None, limit: Int | None = None) -> Call[SequencePage]:
    """Up to `limit` sequences by id, those after `after` (None: from the start)."""
    fields = plain_fields({"after": after, "limit": limit})
    return Call("list_sequences", reads("list_sequences"), fields=fields)


def get_sequence(sequence: str) -> Call[SequenceInfo]:
    """One sequence; raises `UnknownSequence`."""
    fields = {"id": sequence_id(sequence)}
    return Call("get_sequence", reads("get_sequence"), fields=fields)


def delete_sequence(sequence: str) -> Call[None]:
    """Delete a sequence, its forks stay; raises `UnknownSequence`."""
    fields = {"id": sequence_id(sequence)}
    return Call("delete_sequence", nothing, fields=fields, recover=settled_by(UnknownSequence))


def truncate(
    sequence: str,
    length: Int,
    *,
    keep: Indices | None = None,
    reserve: Int | None = None,
    token_ids: TokenIds | None = None,
) -> Call[SequenceInfo]:
    """Cut every layer to `length` tokens, and keep those at `keep` as well.

    `keep` are tokens behind `length`, in rising order, counted from the start of the sequence, such
    as the accepted path of a tree of drafts. They move up to follow `length`. The sequence's
    reserve stays, or is lowered to `reserve` tokens behind the new length (0: released).
    `token_ids` are those of tokens that it has then, from its `known_len` on, but at most from
    `length` on. Raises `UnknownSequence`, `InvalidRequest`, `OutOfPages`, `KeyMismatch`.
    """
    kept = whole_numbers(keep, "keep")
    named = sequence_id(sequence, many="truncate_sequences")
    given = {"length": whole_number(length, "length"), "keep": kept, "reserve": reserve}
    ids, _ = row_ids(token_ids)
    fields = plain_fields(
        {"id": named, **given, "token_ids": None if ids is None else ids.tolist()}
    )
    # Without `keep`, cutting to the same length again changes nothing.
    return Call("truncate", reads("truncate"), repeatable=not kept, fields=fields)


def truncate_sequences(
    sequences: Sequence[str],
    lengths: Indices,
    *,
    keep: Sequence[Indices] | None = None,
    reserve: Int | None = None,
    token_ids: Sequence[TokenIds] | None = None,
) -> Call[tuple[SequenceInfo, ...]]:
    """`truncate` for many sequences, all or none; `keep` and `token_ids` have a list for each,
    `reserve` is for all.

    Raises `UnknownSequence`, `InvalidRequest`, `OutOfPages`, `KeyMismatch`.
    """
    kept = [whole_numbers(one, f"keep[{at}]") or [] for at, one in enumerate(keep or ())]
    ids = sequence_ids(sequences)
    if keep is not None and len(kept) != len(ids):
        raise ValueError(f"keep has {len(kept)} lists: it must have {len(ids)}, one per sequence")
    fields: dict[str, Any] = {"sequences": ids, "lengths": whole_numbers(lengths, "lengths")}
    named, sums = row_ids(token_ids)
    if named is not None:
        fields |= {"token_ids": named.tolist(), "ids_indptr": sums}
    fields |= plain_fields({"reserve": reserve})
    if any(kept):
        fields["keep"] = [at for one in kept for at in one]
        fields["keep_indptr"] = indptr_of(kept)
    return Call(
        "truncate_sequences", reads("truncate_sequences"), repeatable=not any(kept), fields=fields
    )


def page_table(sequences: Sequence[str], layer: Int = 0) -> Call[PageTable]:
    """The CSR page table at a layer, and the cascade levels; raises `UnknownSequence`."""
    fields = plain_fields({"sequences": sequence_ids(sequences), "layer": layer})
    return Call("page_table", reads("page_table"), fields=fields)


def info() -> Call[Info]:
    """Geometry, dtypes, backend, device, limits, version, instance id."""
    return Call("info", reads("info"))


def pool() -> Call[Pool]:
    """Page and sequence counts, and the integrity check's verdict."""
    return Call("pool", reads("pool"))


def engines(*, counts: bool = False) -> Call[tuple[EngineInfo, ...]]:
    """The engines of the service with their pages and pace; with `counts` also their counters."""
    fields = {"counts": True} if counts else {}
    return Call("engines", reads("engines"), fields=fields)


def drain_engine(name: str, *, stop: bool = False) -> Call[int]:
    """Drain an engine of a cluster: it accepts no new sequences, and the others take over its own.
    `stop` ends the drain. Returns at once with the number of sequences left; `engines` shows the
    progress."""
    fields = {"name": sequence_id(name, "name"), "stop": stop}
    return Call("drain_engine", lambda reply: int(reply.fields["sequences"]), fields=fields)


def snapshot() -> Call[Snapshot]:
    """The state of every page and the tree's largest parts, of all namespaces.

    Needs the scope `admin`. It is at most a fifth of a second old, a very large tree a little
    more.
    """
    return Call("snapshot", reads("snapshot"))


def live() -> Call[Health]:
    """Whether the process answers at all."""
    return Call("live", health_of, also_answers=(503,))


def ready() -> Call[Health]:
    """Whether the service takes requests; a service that does not is an answer, not an error."""
    return Call("ready", health_of, also_answers=(503,))


def metrics() -> Call[str]:
    """The metrics in Prometheus' text format."""
    return Call("metrics", lambda reply: reply.text)


def health_of(reply: Reply) -> Health:
    return Health(reply.status == 200, str(reply.fields.get("detail", "")), reply.meta)
