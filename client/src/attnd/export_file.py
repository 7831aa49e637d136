"""Exports in files: a header and its parts one after another, each an image behind its length.

    16 bytes     "attnd export 1", padded with zeros
    8 bytes      length of an image, little-endian
    image        the header: fields `header` and `digest`, the names of pages as its tensor
    8 bytes, image, and so on: the parts, with fields `part`, `before` and `digest`, tensors k and v

A file that ends before its last part is an interrupted export, which can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import numpy as np

from attnd.calls.transfer import Array, ExportHeader, ExportPart
from attnd.wire import images
from attnd.wire.images import request_image

MAGIC: Final = b"attnd export 1".ljust(16, b"\0")
LENGTH_BYTES: Final = 8
LONGEST_RECORD: Final = 2**40
PIECE_BYTES: Final = 2**24
"""Bytes of a record that are read at a time: a wrong length costs no more memory than that."""
TEXTS: Final = ("before", "digest")


class ExportFileError(ValueError):
    """The file is not an export, or is damaged at the byte in the message."""


class InterruptedExport(ExportFileError):
    """The file ends before the export does, in the record that begins at byte `begin`."""

    def __init__(self, begin: int, what: str) -> None:
        super().__init__(f"the export ends early, at byte {begin}: {what}")
        self.begin, self._what = begin, what

    def __reduce__(self) -> tuple[type[InterruptedExport], tuple[int, str]]:
        """Pickled: a process pool returns it to its caller."""
        return type(self), (self.begin, self._what)


def write_header(file: BinaryIO, header: ExportHeader) -> None:
    file.write(MAGIC)
    fields = {"header": dict(header.fields), "digest": header.digest}
    write_record(file, fields, header.names)


def write_part(file: BinaryIO, part: ExportPart) -> None:
    fields = {"part": part.number, "before": part.before, "digest": part.digest}
    write_record(file, fields, {"k": part.k, "v": part.v})


def write_record(file: BinaryIO, fields: dict[str, Any], arrays: Mapping[str, Array]) -> None:
    pieces = request_image(fields, arrays)
    file.write(sum(map(len, pieces)).to_bytes(LENGTH_BYTES, "little"))
    for piece in pieces:
        file.write(piece)


class ExportReader:
    """Reads an export from its beginning; `end` is the byte after the last whole record."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises `ExportFileError`."""
        self._file = file
        self.end = 0
        magic = file.read(len(MAGIC))
        if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
            raise InterruptedExport(0, "it has no header")
        if magic != MAGIC:
            raise ExportFileError(f"the file begins with {magic!r}: it is not an export")
        self.end = len(MAGIC)
        fields, arrays = self._record()
        self.header = read_header(fields, arrays)

    def parts(self) -> Iterator[ExportPart]:
        """The parts in order. Raises `InterruptedExport` where the next one is not whole, and
        `ExportFileError` where it is damaged."""
        before = self.header.digest
        for number in range(self.header.num_parts):
            at = self.end
            fields, arrays = self._record()
            part = read_part(fields, arrays, at)
            if (part.number, part.before) != (number, before):
                raise ExportFileError(
                    f"byte {at}: part {part.number} after digest {part.before}, expected part "
                    f"{number} after {before}"
                )
            before = part.digest
            yield part

    def _record(self) -> tuple[dict[str, Any], dict[str, Array]]:
        at = self.end
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if length > LONGEST_RECORD:
            raise ExportFileError(f"byte {at}: a record of {length} bytes: the file is damaged")
        raw = np.frombuffer(self._exactly(length), np.uint8)
        try:
            fields, arrays = images.decode(raw, "request")
        except (ValueError, RecursionError) as error:
            raise ExportFileError(f"byte {at}: {error}: the file is damaged") from error
        self.end = at + LENGTH_BYTES + length
        return fields, arrays

    def _exactly(self, length: int) -> bytearray:
        got = bytearray()
        while len(got) < length:
            piece = self._file.read(min(PIECE_BYTES, length - len(got)))
            if not piece:
                raise InterruptedExport(self.end, f"{length} bytes expected, {len(got)} found")
            got += piece
        return got


def read_header(fields: dict[str, Any], arrays: Mapping[str, Array]) -> ExportHeader:
    """The header of a file's first record; the importing service checks its fields."""
    header, digest = fields.get("header"), fields.get("digest")
    counts = header.get("num_parts") if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(digest, str) or type(counts) is not int:
        shown = json.dumps(fields)[:200]
        raise ExportFileError(f"the first record is {shown}: it should be a header")
    return ExportHeader(header, digest, dict(arrays))


def read_part(fields: dict[str, Any], arrays: Mapping[str, Array], at: int) -> ExportPart:
    number = fields.get("part")
    texts = [fields.get(name) for name in TEXTS]
    if type(number) is not int or not all(isinstance(text, str) for text in texts):
        shown = json.dumps(fields)[:200]
        raise ExportFileError(f"byte {at}: the record is {shown}: it should be a part")
    if arrays.keys() != {"k", "v"}:
        raise ExportFileError(f"byte {at}: a part with tensors {sorted(arrays)}: not k and v")
    return ExportPart(number, str(texts[0]), str(texts[1]), arrays["k"], arrays["v"])
