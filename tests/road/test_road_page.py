"""docs/road.md agrees with the code, so that a client can be written from the page alone."""

from __future__ import annotations

import re
from pathlib import Path
from struct import Struct

import pytest
from attnd.wire import frames as f

from service.operations.table import OPERATIONS
from service.road.engine_end.calls import MAX_CALLS, MAX_OUTPUT_BYTES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "road.md").read_text()


def table(title: str) -> list[list[str]]:
    """The rows of the table whose head has `title`."""
    rows = PAGE[PAGE.index(title) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("title", "layout", "size"),
    [
        ("| header |", f.HEADER, 8),
        ("| payload of CALL |", f.CALL_PAYLOAD, 64),
        ("| payload of ANSWER |", f.ANSWER_PAYLOAD, 56),
        ("| payload of CANCEL |", f.CALL_ID, 8),
    ],
)
def test_fields_are_at_the_documented_offsets(title: str, layout: Struct, size: int) -> None:
    rows = [(int(row[0]), int(row[1])) for row in table(title) if row[1]]
    sizes = [Struct(f"<{code}").size for code in re.findall(r"\d*[A-Za-z]", layout.format)]
    assert [size for _, size in rows] == sizes, title
    assert [offset for offset, _ in rows] == [sum(sizes[:i]) for i in range(len(sizes))], title
    assert sum(sizes) == size == layout.size


def test_kinds_have_their_numbers() -> None:
    rows = {int(row[0]): row[1] for row in table("| kind | name |")}
    assert rows == f.NAMES
    callers = {int(row[0]) for row in table("| kind | name |") if row[2] == "caller"}
    assert callers == set(f.FROM_CALLER)


def test_routes_have_their_numbers_and_paths() -> None:
    rows = [[cell.strip("`") for cell in row[:3]] for row in table("| number | name |")]
    assert rows == [[str(o.number), o.name, f"{o.method} {o.path}"] for o in OPERATIONS]


def test_the_code_packs_the_documented_example() -> None:
    words = " ".join(PAGE.split())
    hello = f.frame(f.HELLO, b'{"version":1,"arena_bytes":65536}')
    assert f"{hello[:8].hex(' ')} {hello[8:].decode()}" in words
    call = f.CALL_FRAME.pack(f.CALL, 0, 64, 1, 9, 0, 0, 0, 2200, 4096, 4096, bytes(16))
    assert call.hex(" ") in words


def test_documented_limits_equal_the_code() -> None:
    assert f"| calls in flight of a session | {MAX_CALLS}," in PAGE
    assert f"leaves {MAX_OUTPUT_BYTES >> 20} MiB of answers unread" in PAGE
    assert f"| a caller's JSON frame | {f.MAX_JSON_BYTES >> 10} KiB |" in PAGE
    assert f"| an ANSWER's frame | {f.MAX_INLINE_BYTES >> 20} MiB of image" in PAGE
