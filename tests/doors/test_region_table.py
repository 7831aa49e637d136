"""The doors' table of regions: seen by all at once, changed by one at a time, never half."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from service.doors.oip.region_table import PLACES, Region, RegionTable, make_table

MINE = Region("/mine", 0, 64)


@pytest.fixture
def file() -> Iterator[int]:
    fd = make_table()
    yield fd
    os.close(fd)


@pytest.fixture
def tables(file: int) -> Iterator[tuple[RegionTable, RegionTable]]:
    """As two doors have it."""
    made = RegionTable(file), RegionTable(file)
    yield made
    for one in made:
        one.close()


def test_what_one_door_changes_the_other_sees(tables: tuple[RegionTable, RegionTable]) -> None:
    one, other = tables
    assert one.of("red") == other.of("red") == {}
    with one.changing("red") as regions:
        regions["a"] = MINE
    assert other.of("red") == {"a": MINE} and other.of("blue") == {}
    with other.changing("red") as regions:
        assert regions == {"a": MINE}
        regions["b"] = Region("/other", 8, 8)
        del regions["a"]
    assert one.of("red") == {"b": Region("/other", 8, 8)}
    with one.changing("red") as regions:
        regions.clear()
    assert other.of("red") == {}


def test_a_change_that_fails_changes_nothing(tables: tuple[RegionTable, RegionTable]) -> None:
    one, other = tables
    with one.changing("red") as regions:
        regions["a"] = MINE
    with pytest.raises(ValueError, match=r"no"), one.changing("red") as regions:
        regions.clear()
        raise ValueError("no")
    assert one.of("red") == other.of("red") == {"a": MINE}


def test_a_door_that_dies_while_it_writes_leaves_the_table_as_it_was(
    file: int, tables: tuple[RegionTable, RegionTable]
) -> None:
    one, other = tables
    with one.changing("red") as regions:
        regions["a"] = MINE
    os.pwrite(file, b"\xff" * 40, PLACES[0])  # the next place, without the count after it
    assert other.of("red") == {"a": MINE}
    with other.changing("red") as regions:
        regions["b"] = MINE
    assert one.of("red") == {"a": MINE, "b": MINE}


def test_changes_of_two_doors_at_once_are_all_kept(
    tables: tuple[RegionTable, RegionTable],
) -> None:
    def add(table: RegionTable, name: str) -> None:
        for i in range(100):
            with table.changing("red") as regions:
                regions[f"{name}-{i}"] = MINE

    adding = [threading.Thread(target=add, args=(table, str(i))) for i, table in enumerate(tables)]
    for one in adding:
        one.start()
    for one in adding:
        one.join()
    assert len(tables[0].of("red")) == 200
