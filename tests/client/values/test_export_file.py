"""Files of exports: read as they were written, and refused where they are not whole or damaged."""

from __future__ import annotations

import io
import random
import secrets

import numpy as np
import pytest
from attnd import ExportFileError, ExportHeader, ExportPart, InterruptedExport
from attnd.export_file import ExportReader, write_header, write_part

CASES = 3000


HEADER = ExportHeader(
    {"num_parts": 3, "part_bytes": 64, "generation": "0" * 32, "cache_salt": ""},
    "a" * 64,
    {"token_ids": np.arange(8, dtype=np.uint32)},
)


def parts(header: ExportHeader = HEADER) -> list[ExportPart]:
    before, made = header.digest, []
    for number in range(header.num_parts):
        k = np.full((2, 1, 4), number, np.float16)
        made.append(ExportPart(number, before, f"{number:064x}", k, k + 1))
        before = made[-1].digest
    return made


def written(header: ExportHeader = HEADER) -> bytes:
    """The whole file."""
    file = io.BytesIO()
    write_header(file, header)
    for part in parts(header):
        write_part(file, part)
    return file.getvalue()


def read(raw: bytes) -> tuple[ExportReader, list[int]]:
    reader = ExportReader(io.BytesIO(raw))
    return reader, [part.number for part in reader.parts()]


def test_a_file_is_read_as_it_was_written() -> None:
    reader = ExportReader(io.BytesIO(written()))
    assert reader.header.fields == HEADER.fields and reader.header.digest == HEADER.digest
    assert reader.header.names["token_ids"].tolist() == list(range(8))
    for got, want in zip(reader.parts(), parts(), strict=True):
        assert (got.number, got.before, got.digest) == (want.number, want.before, want.digest)
        assert got.k.dtype == np.float16
        np.testing.assert_array_equal(got.k, want.k)
        np.testing.assert_array_equal(got.v, want.v)
    assert reader.end == len(written())


def test_a_file_cut_anywhere_ends_early_and_keeps_whole_parts() -> None:
    whole = written()
    for length in range(0, len(whole), 7):
        with pytest.raises(InterruptedExport) as reply:
            read(whole[:length])
        assert reply.value.begin <= length
    assert read(whole)[1] == [0, 1, 2]


def nested(depth: int) -> bytes:
    """An export whose header is lists in lists."""
    sizes = (depth + 8).to_bytes(8, "little") + depth.to_bytes(8, "little")
    return written()[:16] + sizes + b"[" * depth


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"PK\x03\x04" + bytes(40), "it is not an export"),
        (written()[:16] + (2**63).to_bytes(8, "little"), "damaged"),
        (written()[:16] + (2**39).to_bytes(8, "little"), "ends early"),
        (written()[:16] + (8).to_bytes(8, "little") + bytes(8), "damaged"),
        (nested(10**5), "recursion depth exceeded.*damaged"),
        (written().replace(b'\\"part\\":1', b'\\"part\\":2'), "expected part 1"),
        (written().replace(b'"v"', b'"w"'), "not k and v"),
        (written().replace(b'\\"digest\\"', b'\\"deepest\\"'), "it should be a header"),
    ],
)
def test_a_file_that_is_not_an_export_is_refused_with_the_reason(raw: bytes, words: str) -> None:
    with pytest.raises(ExportFileError, match=words):
        read(raw)


def test_files_with_bytes_changed_are_read_or_refused_and_nothing_else() -> None:
    seed = secrets.randbits(40)
    print(f"seed {seed}")
    rng, whole = random.Random(seed), written()
    refused = 0
    for _ in range(CASES):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            match rng.randrange(3):
                case 0:
                    raw[at] = rng.randrange(256)
                case 1:
                    del raw[at : at + rng.randint(1, 40)]
                case _:
                    raw[at:at] = rng.randbytes(rng.randint(1, 9))
        try:
            _, numbers = read(bytes(raw))
            assert numbers == list(range(len(numbers)))
        except ExportFileError:
            refused += 1
    assert refused > CASES // 4
