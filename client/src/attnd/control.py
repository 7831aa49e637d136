"""The calls without arrays: sequences, page tables, info, pool, health, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from attnd.call import Call, Reply, Settled
from attnd.errors import ProtocolError, ServiceError, UnknownSequence
from attnd.results import (
    Health,
    Info,
    Int32,
    Meta,
    PageTable,
    PageTableLevel,
    Pool,
    SequenceInfo,
    SequencePage,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewSequence:
    """`id` None: the service makes one. With `parent`, fork it at `length` (None: all of it)."""

    id: str | None = None
    parent: str | None = None
    length: int | None = None

    def document(self) -> dict[str, Any]:
        given = {"id": self.id, "parent": self.parent, "length": self.length}
        return {name: value for name, value in given.items() if value is not None}


def create_sequences(sequences: Sequence[NewSequence]) -> Call[tuple[SequenceInfo, ...]]:
    """Make sequences, empty or forked, all or none; answers them in the order given.

    Raises `SequenceExists`, `UnknownSequence` (a parent), `OutOfPages`, `InvalidRequest`.
    """
    return Call(
        "create_sequences",
        reads(lambda reply: tuple(sequence_infos(reply))),
        repeatable=False,  # a second time the ids exist, or more ids are made
        fields={"sequences": [new.document() for new in sequences]},
    )


def create_sequence(
    id: str | None = None, *, parent: str | None = None, length: int | None = None
) -> Call[SequenceInfo]:
    """`create_sequences` of one: empty, or `parent` forked at `length` (None: all of it)."""
    return Call(
        "create_sequences",
        reads(lambda reply: sequence_infos(reply)[0]),
        repeatable=False,
        fields={"sequences": [NewSequence(id, parent, length).document()]},
    )


def sequence_page(after: str | None = None, limit: int | None = None) -> Call[SequencePage]:
    """Up to `limit` sequences by id, those after `after` (None: from the start)."""
    given = {"after": after, "limit": limit}
    return Call(
        "list_sequences",
        reads(
            lambda reply: SequencePage(
                tuple(sequence_infos(reply)), reply.fields.get("next"), reply.meta
            )
        ),
        repeatable=True,
        fields={name: value for name, value in given.items() if value is not None},
    )


def get_sequence(sequence: str) -> Call[SequenceInfo]:
    """One sequence; raises `UnknownSequence`."""
    return Call("get_sequence", reads(sequence_of_reply), repeatable=True, fields={"id": sequence})


def delete_sequence(sequence: str) -> Call[None]:
    """Delete a sequence, its forks stay; raises `UnknownSequence`."""
    return Call(
        "delete_sequence",
        lambda reply: None,
        repeatable=True,
        fields={"id": sequence},
        recover=is_gone,
    )


def is_gone(error: ServiceError) -> Settled[None] | None:
    """A sequence unknown on the second attempt was deleted by the first."""
    return Settled(None) if isinstance(error, UnknownSequence) else None


def truncate(sequence: str, length: int) -> Call[SequenceInfo]:
    """Cut every layer to `length` tokens; raises `UnknownSequence`, `InvalidRequest`."""
    return Call(
        "truncate",
        reads(sequence_of_reply),
        repeatable=True,  # cutting to the same length again changes nothing
        fields={"id": sequence, "length": length},
    )


def page_table(sequences: Sequence[str], layer: int = 0) -> Call[PageTable]:
    """The CSR page table at a layer, and the cascade levels; raises `UnknownSequence`."""
    return Call(
        "page_table",
        reads(page_table_of),
        repeatable=True,
        fields={"sequences": list(sequences), "layer": layer},
    )


def info() -> Call[Info]:
    """Geometry, dtypes, backend, device, limits, version, instance id."""
    return Call("info", reads(info_of), repeatable=True)


def pool() -> Call[Pool]:
    """Page and sequence counts, and the integrity check's verdict."""
    return Call("pool", reads(pool_of), repeatable=True)


def live() -> Call[Health]:
    """Whether the process answers at all."""
    return Call("live", health_of, repeatable=True, also_answers=(503,))


def ready() -> Call[Health]:
    """Whether the service takes requests; a service that does not is an answer, not an error."""
    return Call("ready", health_of, repeatable=True, also_answers=(503,))


def metrics() -> Call[str]:
    """The metrics in Prometheus' text format."""
    return Call("metrics", lambda reply: reply.text, repeatable=True)


def reads(parse: Callable[[Reply], T]) -> Callable[[Reply], T]:
    """A parser whose surprises (a field missing, a value of another kind) are `ProtocolError`."""

    def parse_or_say(reply: Reply) -> T:
        try:
            return parse(reply)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            told = f"the answer lacks what the contract promises: {error!r}"
            raise ProtocolError(told, reply.meta.request_id) from error

    return parse_or_say


def sequence_infos(reply: Reply) -> list[SequenceInfo]:
    return [sequence_info(document, reply.meta) for document in reply.fields["sequences"]]


def sequence_of_reply(reply: Reply) -> SequenceInfo:
    return sequence_info(reply.fields, reply.meta)


def sequence_info(document: dict[str, Any], meta: Meta) -> SequenceInfo:
    return SequenceInfo(
        id=document["id"],
        length=document["length"],
        lengths=tuple(document["lengths"]),
        pages=document["pages"],
        last_page_len=document["last_page_len"],
        parent=document["parent"],
        meta=meta,
    )


def indices(values: Any) -> Int32:
    return np.asarray(values, dtype=np.int32)


def page_table_of(reply: Reply) -> PageTable:
    table = reply.fields
    levels = tuple(
        PageTableLevel(
            qo_indptr=indices(level["qo_indptr"]),
            kv_indptr=indices(level["kv_indptr"]),
            kv_indices=indices(level["kv_indices"]),
            kv_last_page_len=indices(level["kv_last_page_len"]),
        )
        for level in table["levels"]
    )
    return PageTable(
        kv_indptr=indices(table["kv_indptr"]),
        kv_indices=indices(table["kv_indices"]),
        kv_last_page_len=indices(table["kv_last_page_len"]),
        levels=levels,
        order=indices(table["order"]),
        meta=reply.meta,
    )


def info_of(reply: Reply) -> Info:
    document = dict(reply.fields)
    known = {field.name for field in fields(Info)} - {"meta"}
    document |= {name: tuple(document[name]) for name in ("tensor_dtypes", "unsupported")}
    return Info(**{name: document[name] for name in known}, meta=reply.meta)


def pool_of(reply: Reply) -> Pool:
    known = {field.name for field in fields(Pool)} - {"meta"}
    return Pool(**{name: reply.fields[name] for name in known}, meta=reply.meta)


def health_of(reply: Reply) -> Health:
    return Health(reply.status == 200, str(reply.fields.get("detail", "")), reply.meta)
