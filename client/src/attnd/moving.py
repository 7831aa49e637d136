"""Whole exports and imports: generators that yield calls and are sent their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol, TypeVar

from attnd.calls import transfer
from attnd.calls.arguments import Int
from attnd.calls.call import Call
from attnd.calls.transfer import ExportHeader, ExportPart
from attnd.errors import DigestMismatch, KeyMismatch
from attnd.export_file import ExportFileError, ExportReader, write_header, write_part
from attnd.retries import Steps, driven
from attnd.splitting import commit
from attnd.wire.answers import ImportState

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called after each part with the number of parts done, and of all parts."""
Place = str | os.PathLike[str] | BinaryIO
"""A path, or a binary file that is open."""

SENT_AGAIN: Final = 2
"""Retries of a part that was damaged in transit."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`share`: begin with pages that are cached under the export's names, and commit the others.
    `idle_s`: idle seconds after which the service gives an import up."""

    share: bool = True
    idle_s: float | None = None


DEFAULT: Final = ImportOptions()


def silent(done: int, of: int) -> None:
    """Reports no progress."""


def export(
    sequence: str, to: Place, *, part_bytes: Int | None = None, progress: Progress = silent
) -> Steps[ExportHeader]:
    """Write a sequence's KV to a file: a path, or a binary file that is open.

    An interrupted export to the same path is resumed if the sequence has not changed since.
    `progress(done, of)` is called after every part (by `AsyncClient` in a thread). Raises
    `SequenceChanged` when the sequence changes meanwhile (export a fork of a growing one), OSError,
    and the errors of a call.
    """
    header: ExportHeader = yield transfer.export_header(sequence, part_bytes=part_bytes)
    with opened_to_write(to, header) as (file, done, before):
        for number in range(done, header.num_parts):
            part: ExportPart = yield transfer.export_part(sequence, header, number, before=before)
            write_part(file, part)
            before = part.digest
            progress(number + 1, header.num_parts)
    return header


@contextmanager
def opened_to_write(to: Place, header: ExportHeader) -> Iterator[tuple[BinaryIO, int, str]]:
    """The file, the number of whole parts in it, and the digest of the last one."""
    if not isinstance(to, (str, os.PathLike)):
        write_header(to, header)
        yield to, 0, header.digest
        return
    done, before, end = parts_in(to, header)
    with open(to, "r+b" if done else "wb") as file:
        file.truncate(end)
        file.seek(end)
        if not done:
            write_header(file, header)
        yield file, done, before


def parts_in(path: str | os.PathLike[str], header: ExportHeader) -> tuple[int, str, int]:
    """Number of whole parts of this export in a file, the last one's digest, and their end."""
    done, before, end = 0, header.digest, 0
    with suppress(FileNotFoundError, ExportFileError), open(path, "rb") as file:
        reader = ExportReader(file)
        if reader.header.digest != header.digest:
            return done, before, end
        for part in reader.parts():
            done, before, end = part.number + 1, part.digest, reader.end
    return done, before, end


def import_(
    sequence: str, origin: Place, *, options: ImportOptions = DEFAULT, progress: Progress = silent
) -> Steps[ImportState]:
    """Make a sequence from a file that `export` wrote; an interrupted import is resumed.

    A part that is damaged in transit is sent again. Raises `ExportFileError` for a file that is not
    an export, or is incomplete (the import then waits for the rest), the errors of `begin_import`,
    and a call's errors.
    """
    with (
        open(origin, "rb") if isinstance(origin, (str, os.PathLike)) else nullcontext(origin)
    ) as file:
        reader = ExportReader(file)
        state: ImportState = yield begin(sequence, reader.header, options)
        digest = reader.header.digest
        for part in reader.parts():
            digest = part.digest
            if part.number >= state.next_part:
                yield from sent_until_whole(sequence, part)
                progress(part.number + 1, state.num_parts)
    return (yield from ended(sequence, reader.header, digest, options))


def begin(sequence: str, header: ExportHeader, options: ImportOptions) -> Call[ImportState]:
    return transfer.begin_import(sequence, header, share=options.share, idle_s=options.idle_s)


def sent_until_whole(sequence: str, part: ExportPart) -> Steps[None]:
    """Send a part, again where it was damaged in transit."""
    for _ in range(SENT_AGAIN):
        with suppress(DigestMismatch):
            yield transfer.import_part(sequence, part)
            return
    yield transfer.import_part(sequence, part)


def ended(
    sequence: str, header: ExportHeader, digest: str, options: ImportOptions
) -> Steps[ImportState]:
    """End the import, and commit the pages under the export's names."""
    state: ImportState = yield transfer.end_import(sequence, digest)
    if options.share and (prefix := header.prefix) is not None:
        with suppress(KeyMismatch):  # the cache has other pages under these names, which stay
            made = commit(sequence, prefix)
            if isinstance(made, Call):
                yield made
            else:
                yield from made
    return state


class Sends(Protocol):
    """A `Client` or `Session`."""

    def send(self, call: Call[T]) -> T: ...


def copy_sequence(
    source: Sends,
    target: Sends,
    sequence: str,
    name: str | None = None,
    *,
    part_bytes: Int | None = None,
    options: ImportOptions = DEFAULT,
    progress: Progress = silent,
) -> ImportState:
    """Copy a sequence from one service to another, or to another name; the original stays.

    An interrupted copy is resumed if the sequence has not changed since. Raises the errors of
    `export` and `import_`.
    """

    def copying(name: str) -> Steps[ImportState]:
        header = source.send(transfer.export_header(sequence, part_bytes=part_bytes))
        state: ImportState = yield begin(name, header, options)
        before = state.digest or header.digest
        for number in range(state.next_part, state.num_parts):
            part = source.send(transfer.export_part(sequence, header, number, before=before))
            yield from sent_until_whole(name, part)
            before = part.digest
            progress(number + 1, state.num_parts)
        return (yield from ended(name, header, before, options))

    return driven(copying(name or sequence), target.send)
