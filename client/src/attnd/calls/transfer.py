"""The calls of exports and imports: a sequence's header, its parts, and how far an import is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnd.calls.arguments import Int, plain_fields, sequence_id, whole_number
from attnd.calls.call import Call, Reply, Settled, no_recovery, nothing, reads, settled_by
from attnd.calls.prefix import Prefix
from attnd.errors import PartMismatch, SequenceExists, ServiceError, UnknownImport
from attnd.wire.answers import ImportState
from attnd.wire.meta import NO_META, Meta

Array = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ExportHeader:
    """The beginning of an export. `fields` go to the importer unchanged; `names` is the tensor with
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
        """Changes with the sequence: parts of two generations must not be mixed."""
        return str(self.fields["generation"])

    @property
    def prefix(self) -> Prefix | None:
        """The names of its pages, for a commit at the importer."""
        if not self.names:
            return None
        ids, keys = self.names.get("token_ids"), self.names.get("page_keys")
        extra = [(one["first_token"], one["key"]) for one in self.fields.get("extra") or ()]
        return Prefix(ids, keys, str(self.fields["cache_salt"]), extra=extra)


@dataclass(frozen=True, slots=True, eq=False)
class ExportPart:
    """Rows as the pool stores them. `digest` covers `before`, the digest of the previous part or of
    the header, so the last part's covers the whole export."""

    number: int
    before: str
    digest: str
    k: Array
    v: Array
    meta: Meta = field(default=NO_META, repr=False)


def export_header(sequence: str, *, part_bytes: Int | None = None) -> Call[ExportHeader]:
    """The header of a sequence's export, with at most `part_bytes` bytes of k and v in a part.

    Raises `UnknownSequence`.
    """
    fields = plain_fields({"id": sequence_id(sequence), "part_bytes": part_bytes})
    return Call("export_sequence", header_of, fields=fields)


def export_part(
    sequence: str, header: ExportHeader, number: Int, *, before: str
) -> Call[ExportPart]:
    """One part of a sequence. Raises `SequenceChanged` where it differs from the header."""
    part = whole_number(number, "number")
    fields = {
        "id": sequence_id(sequence),
        "part": part,
        "before": before,
        "generation": header.generation,
        "part_bytes": header.fields["part_bytes"],
    }

    def part_of(reply: Reply) -> ExportPart:
        arrays = reply.tensors
        digest = str(reply.fields["digest"])
        return ExportPart(part, before, digest, arrays["k"], arrays["v"], reply.meta)

    room = int(header.fields["part_bytes"])
    return Call("export_sequence", part_of, fields=fields, answer_bytes=room)


def begin_import(
    sequence: str, header: ExportHeader, *, share: bool = True, idle_s: float | None = None
) -> Call[ImportState]:
    """Begin an import, or get its progress. All its pages are taken at once, or `OutOfPages`
    raised.

    `share`: begin with the pages that are cached under the export's names. `idle_s`: idle seconds
    after which the service gives it up. Raises `SequenceExists`, `ImportExists`,
    `InvalidRequest` for an export of another pool, `DigestMismatch`.
    """
    fields = {
        "header": dict(header.fields),
        "digest": header.digest,
        "share": share,
        "idle_s": None if idle_s is None else float(idle_s),
    }
    return import_call(sequence, plain_fields(fields), header.names)


def import_part(sequence: str, part: ExportPart) -> Call[ImportState]:
    """Send the next part, see `ImportState`.

    Raises `PartMismatch` for any other, `DigestMismatch`, `UnknownImport`.
    """
    fields = {"part": part.number, "before": part.before, "digest": part.digest}

    def landed(error: ServiceError) -> Call[ImportState] | None:
        if isinstance(error, PartMismatch) and error.next_part == part.number + 1:
            return get_import(sequence)
        return None

    return import_call(sequence, fields, {"k": part.k, "v": part.v}, landed)


def end_import(sequence: str, digest: str) -> Call[ImportState]:
    """End an import with the digest of its last part: the sequence exists from now on.

    Raises `PartMismatch` while parts are missing, `DigestMismatch`, `UnknownImport`.
    """

    def landed(error: ServiceError) -> Settled[ImportState] | None:
        if isinstance(error, SequenceExists):
            return Settled(ImportState(sequence, "done", 0, 0))
        return None

    return import_call(sequence, {"digest": digest}, {}, landed)


def get_import(sequence: str) -> Call[ImportState]:
    """Progress of an import; raises `UnknownImport`."""
    return Call("get_import", reads("get_import"), fields={"id": sequence_id(sequence)})


def cancel_import(sequence: str) -> Call[None]:
    """Cancel an import and free its pages; raises `UnknownImport`."""
    fields = {"id": sequence_id(sequence)}
    return Call("cancel_import", nothing, fields=fields, recover=settled_by(UnknownImport))


def import_call(
    sequence: str,
    fields: dict[str, Any],
    arrays: Mapping[str, Array],
    recover: Callable[[ServiceError], Any] = no_recovery,
) -> Call[ImportState]:
    """Repeatable: a second part or end is refused, which `recover` recognises."""
    fields = {"id": sequence_id(sequence), **fields}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    parse = reads("import_sequence")
    return Call("import_sequence", parse, fields=fields, arrays=arrays, recover=recover)


def header_of(reply: Reply) -> ExportHeader:
    fields = dict(reply.fields["header"])
    return ExportHeader(fields, str(reply.fields["digest"]), dict(reply.tensors), reply.meta)
