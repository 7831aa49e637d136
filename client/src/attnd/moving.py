"""Whole exports and imports: generators that yield calls and are sent their results.

The clients only execute the calls, so blocking and asyncio clients cannot differ.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Final, Literal, Protocol, TypeVar, cast

from attnd.calls.call import Call
from attnd.calls.prefix import commit
from attnd.calls.transfer import (
    ExportHeader,
    ExportPart,
    ImportState,
    begin_import,
    end_import,
    export_header,
    export_part,
    import_part,
)
from attnd.errors import AttndError, DigestMismatch, KeyMismatch
from attnd.export_file import ExportFileError, ExportReader, write_header, write_part
from attnd.retries import driven

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called after each part with the number of parts done, and of all parts."""
Place = str | os.PathLike[str] | BinaryIO
"""A path, or a binary file that is open."""
End = Literal["source", "target"]
Steps = Generator[tuple[End, Call[Any]], Any, T]
"""Calls, each with the service that it is for; exports are of the source, imports by the target."""

SENT_AGAIN: Final = 2
"""Retries of a part that was damaged in transit."""


class Sender(Protocol):
    """A `Client` or a `Session`."""

    def send(self, call: Call[T]) -> T: ...


class AsyncSender(Protocol):
    """An `AsyncClient`."""

    async def send(self, call: Call[T]) -> T: ...


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`share`: begin with pages that are cached under the export's names, and commit the others.
    `idle_s`: idle seconds after which the service gives an import up."""

    share: bool = True
    idle_s: float | None = None


DEFAULT: Final = ImportOptions()


def silent(done: int, of: int) -> None:
    """Reports no progress."""


def exporting(
    sequence: str, to: Place, part_bytes: int | None, progress: Progress
) -> Steps[ExportHeader]:
    """Write a sequence to a file, resuming an interrupted export of the same generation. Returns
    the header."""
    header: ExportHeader = yield "source", export_header(sequence, part_bytes=part_bytes)
    with opened_to_write(to, header) as (file, done, before):
        for number in range(done, header.num_parts):
            part: ExportPart = yield "source", export_part(sequence, header, number, before=before)
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


def importing(
    sequence: str, origin: Place, options: ImportOptions, progress: Progress
) -> Steps[ImportState]:
    """Make a sequence from a file, resuming an interrupted import.

    Raises `ExportFileError` for an incomplete file: the import then waits for the rest.
    """
    with opened_to_read(origin) as file:
        reader = ExportReader(file)
        state: ImportState = yield from begun(sequence, reader.header, options)
        digest = reader.header.digest
        for part in reader.parts():
            digest = part.digest
            if part.number >= state.next_part:
                yield from sent_until_whole(sequence, part)
                progress(part.number + 1, state.num_parts)
    return (yield from ended(sequence, reader.header, digest, options))


@contextmanager
def opened_to_read(origin: Place) -> Iterator[BinaryIO]:
    if not isinstance(origin, (str, os.PathLike)):
        yield origin
        return
    with open(origin, "rb") as file:
        yield file


def begun(sequence: str, header: ExportHeader, options: ImportOptions) -> Steps[ImportState]:
    call = begin_import(sequence, header, share=options.share, idle_s=options.idle_s)
    state: ImportState = yield "target", call
    return state


def sent_until_whole(sequence: str, part: ExportPart) -> Steps[None]:
    """Send a part, again where it was damaged in transit."""
    for _ in range(SENT_AGAIN):
        with suppress(DigestMismatch):
            yield "target", import_part(sequence, part)
            return
    yield "target", import_part(sequence, part)


def ended(
    sequence: str, header: ExportHeader, digest: str, options: ImportOptions
) -> Steps[ImportState]:
    """End the import, and commit the pages under the export's names."""
    state: ImportState = yield "target", end_import(sequence, digest)
    if options.share and (prefix := header.prefix) is not None:
        with suppress(KeyMismatch):  # the cache has other pages under these names, which stay
            yield "target", commit(sequence, prefix)
    return state


def copying(
    sequence: str, name: str, part_bytes: int | None, options: ImportOptions, progress: Progress
) -> Steps[ImportState]:
    """Copy a sequence from one service to another."""
    header: ExportHeader = yield "source", export_header(sequence, part_bytes=part_bytes)
    state: ImportState = yield from begun(name, header, options)
    before = state.digest or header.digest
    for number in range(state.next_part, state.num_parts):
        part: ExportPart = yield "source", export_part(sequence, header, number, before=before)
        yield from sent_until_whole(name, part)
        before = part.digest
        progress(number + 1, state.num_parts)
    return (yield from ended(name, header, before, options))


async def awaited(steps: Steps[T], send: Callable[[Call[Any]], Awaitable[Any]]) -> T:
    """As `driven`, with awaited calls; files are read and written in a thread."""
    advance: Callable[[Any], tuple[End, Call[Any]] | Finished] = partial(advanced, steps.send)
    given: Any = None
    try:
        while True:
            step = await asyncio.to_thread(advance, given)
            if isinstance(step, Finished):
                return cast(T, step.value)
            try:
                given = await send(step[1])
                advance = partial(advanced, steps.send)
            except AttndError as error:
                given = error
                advance = partial(advanced, steps.throw)
    finally:
        steps.close()


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of steps, because a future must not raise StopIteration."""

    value: Any


def advanced(
    go_on: Callable[[Any], tuple[End, Call[Any]]], given: Any
) -> tuple[End, Call[Any]] | Finished:
    """The next call, or the result of the steps."""
    try:
        return go_on(given)
    except StopIteration as stop:
        return Finished(stop.value)


def export(
    self: Sender,
    sequence: str,
    to: Place,
    *,
    part_bytes: int | None = None,
    progress: Progress = silent,
) -> ExportHeader:
    """Write a sequence's KV to a file: a path, or a binary file that is open.

    An interrupted export to the same path is resumed if the sequence has not changed since.
    `progress(done, of)` is called after every part. Raises `SequenceChanged` when the sequence
    changes meanwhile (export a fork of a growing one), OSError, and the errors of a call.
    """
    return driven(exporting(sequence, to, part_bytes, progress), lambda step: self.send(step[1]))


def import_(
    self: Sender,
    sequence: str,
    origin: Place,
    *,
    options: ImportOptions = DEFAULT,
    progress: Progress = silent,
) -> ImportState:
    """Make a sequence from a file that `export` wrote; an interrupted import is resumed.

    A part that is damaged in transit is sent again. Raises `ExportFileError` for a file that is not
    an export or is incomplete, the errors of `begin_import`, and those of a call.
    """
    return driven(importing(sequence, origin, options, progress), lambda step: self.send(step[1]))


async def export_async(
    self: AsyncSender,
    sequence: str,
    to: Place,
    *,
    part_bytes: int | None = None,
    progress: Progress = silent,
) -> ExportHeader:
    """As `Client.export`; the file is written, and `progress` called, in a thread."""
    return await awaited(exporting(sequence, to, part_bytes, progress), self.send)


async def import_async(
    self: AsyncSender,
    sequence: str,
    origin: Place,
    *,
    options: ImportOptions = DEFAULT,
    progress: Progress = silent,
) -> ImportState:
    """As `Client.import_`; the file is read, and `progress` called, in a thread."""
    return await awaited(importing(sequence, origin, options, progress), self.send)


def copy_sequence(
    source: Sender,
    target: Sender,
    sequence: str,
    name: str | None = None,
    *,
    part_bytes: int | None = None,
    options: ImportOptions = DEFAULT,
    progress: Progress = silent,
) -> ImportState:
    """Copy a sequence from one service to another, or to another name; the original stays.

    An interrupted copy is resumed if the sequence has not changed since. Raises the errors of
    `export` and `import_`.
    """
    steps = copying(sequence, name or sequence, part_bytes, options, progress)
    ends = {"source": source, "target": target}
    return driven(steps, lambda step: ends[step[0]].send(step[1]))
