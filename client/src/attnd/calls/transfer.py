"""The calls of exports and imports: a sequence's header, its parts, and how far an import is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnd.calls.arguments import plain_fields, sequence_id
from attnd.calls.call import Call, Reply, Settled
from attnd.calls.parsing import reads
from attnd.calls.prefix import Prefix, nothing
from attnd.errors import PartMismatch, SequenceExists, ServiceError, UnknownImport
from attnd.results import NO_META, Meta

Array = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ExportHeader:
    """What an export is of. `fields` go to the importer as they came; `names` is the tensor with
    the names of its first pages, where the prefix cache knows them."""

    fields: Mapping[str, Any]
    digest: str
    names: Mapping[str, Array] = field(default_factory=dict)
    meta: Meta = field(default=NO_META, repr=False)

    @property
    def num_parts(self) -> int:
        return int(self.fields["num_parts"])

    @property
    def generation(self) -> str:
        """Another one: the sequence has changed, and parts do not go together."""
        return str(self.fields["generation"])

    @property
    def prefix(self) -> Prefix | None:
        """What names its pages, for a commit where it is imported."""
        if not self.names:
            return None
        return Prefix(**self.names, cache_salt=str(self.fields["cache_salt"]))


@dataclass(frozen=True, slots=True, eq=False)
class ExportPart:
    """Rows as the pool stores them. `digest` is made upon `before`, the digest of the part before
    or of the header: the last part's is that of the whole."""

    number: int
    before: str
    digest: str
    k: Array
    v: Array
    meta: Meta = field(default=NO_META, repr=False)


@dataclass(frozen=True, slots=True)
class ImportState:
    """How far an import is: `state` is `receiving` or `done`; `cached_len` tokens were cached.

    `digest` is that of the last part that came: None where that was passed over. `expires_at` are
    seconds since the epoch, when it is given up; None when it is done.
    """

    id: str
    state: str
    next_part: int
    num_parts: int
    cached_len: int = 0
    digest: str | None = None
    expires_at: float | None = None
    meta: Meta = field(default=NO_META, compare=False, repr=False)


def export_header(sequence: str, *, part_bytes: int | None = None) -> Call[ExportHeader]:
    """What an export of a sequence begins with; `part_bytes` of k and v at most in a part.

    Raises `UnknownSequence`.
    """
    fields = plain_fields({"id": sequence_id(sequence), "part_bytes": part_bytes})
    return Call("export_sequence", reads(header_of), repeatable=True, fields=fields)


def export_part(
    sequence: str, header: ExportHeader, number: int, *, before: str
) -> Call[ExportPart]:
    """One part of a sequence. Raises `SequenceChanged` when it is not what the header told."""
    fields = {
        "id": sequence_id(sequence),
        "part": number,
        "before": before,
        "generation": header.generation,
        "part_bytes": header.fields["part_bytes"],
    }

    def part_of(reply: Reply) -> ExportPart:
        arrays = reply.tensors
        digest = str(reply.fields["digest"])
        return ExportPart(number, before, digest, arrays["k"], arrays["v"], reply.meta)

    room = int(header.fields["part_bytes"])
    return Call(
        "export_sequence", reads(part_of), repeatable=True, fields=fields, answer_bytes=room
    )


def begin_import(
    sequence: str, header: ExportHeader, *, share: bool = True, idle_s: float | None = None
) -> Call[ImportState]:
    """Begin an import, or find out how far it is. Pages are taken at once, `OutOfPages` or none.

    `share`: begin with those pages that are cached by the export's names. `idle_s`: seconds after
    which it is given up when nothing comes. Raises `SequenceExists`, `ImportExists`,
    `InvalidRequest` for an export of another pool, `DigestMismatch`.
    """
    fields = {
        "id": sequence_id(sequence),
        "header": dict(header.fields),
        "digest": header.digest,
        "share": share,
        "idle_s": None if idle_s is None else float(idle_s),
    }
    return import_call(plain_fields(fields), header.names)


def import_part(sequence: str, part: ExportPart) -> Call[ImportState]:
    """Bring one part: the next one, see `ImportState`.

    Raises `PartMismatch` for any other, `DigestMismatch`, `UnknownImport`.
    """
    fields = {
        "id": sequence_id(sequence),
        "part": part.number,
        "before": part.before,
        "digest": part.digest,
    }

    def landed(error: ServiceError) -> Call[ImportState] | None:
        if isinstance(error, PartMismatch) and error.next_part == part.number + 1:
            return get_import(sequence)
        return None

    return import_call(fields, {"k": part.k, "v": part.v}, landed)


def end_import(sequence: str, digest: str) -> Call[ImportState]:
    """End an import with the digest of its last part: the sequence is there from now on.

    Raises `PartMismatch` while parts are missing, `DigestMismatch`, `UnknownImport`.
    """

    def landed(error: ServiceError) -> Settled[ImportState] | None:
        if isinstance(error, SequenceExists):
            return Settled(ImportState(sequence, "done", 0, 0))
        return None

    return import_call({"id": sequence_id(sequence), "digest": digest}, {}, landed)


def get_import(sequence: str) -> Call[ImportState]:
    """How far an import is; raises `UnknownImport`."""
    return Call(
        "get_import", reads(state_of), repeatable=True, fields={"id": sequence_id(sequence)}
    )


def cancel_import(sequence: str) -> Call[None]:
    """Give an import up, and the pages that it has taken; raises `UnknownImport`."""
    fields = {"id": sequence_id(sequence)}
    return Call("cancel_import", nothing, repeatable=True, fields=fields, recover=import_is_gone)


def import_is_gone(error: ServiceError) -> Settled[None] | None:
    """An import unknown on the second attempt was given up by the first."""
    return Settled(None) if isinstance(error, UnknownImport) else None


def import_call(
    fields: dict[str, Any],
    arrays: Mapping[str, Array],
    recover: Callable[[ServiceError], Any] = lambda _: None,
) -> Call[ImportState]:
    return Call(
        "import_sequence",
        reads(state_of),
        repeatable=True,  # a part or an end that has come already is refused, and known by that
        fields=fields,
        arrays={name: np.ascontiguousarray(array) for name, array in arrays.items()},
        recover=recover,
    )


def header_of(reply: Reply) -> ExportHeader:
    fields = dict(reply.fields["header"])
    return ExportHeader(fields, str(reply.fields["digest"]), dict(reply.tensors), reply.meta)


def state_of(reply: Reply) -> ImportState:
    names = [name for name in ImportState.__slots__ if name != "meta"]
    return ImportState(**{name: reply.fields[name] for name in names}, meta=reply.meta)
