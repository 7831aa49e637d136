"""The order in which records of one tier give way."""

from __future__ import annotations

from service.tiers.shelf import Entry, Shelf


def placed(shelf: Shelf, number: int) -> Entry | None:
    """A record that can be read and that no thread holds."""
    entry = shelf.place(number.to_bytes(16, "little"), "a", 35)
    if entry is not None:
        entry.holds, entry.is_ready = 0, True
    return entry


def test_records_that_are_held_are_passed_over_once() -> None:
    """They are in use, so they are the latest ones: else each eviction would look at all again."""
    evicted: list[Entry] = []
    shelf = Shelf(4, evicted.append)
    first, second, third, fourth = (placed(shelf, number) for number in range(4))
    assert first and second and third and fourth
    first.holds = second.holds = 1
    assert placed(shelf, 4)
    assert evicted == [third]
    assert [entry.key[0] for entry in shelf.own("a")] == [3, 0, 1, 4]
    assert placed(shelf, 5)
    assert evicted == [third, fourth]


def test_a_record_finds_no_place_while_all_are_held() -> None:
    evicted: list[Entry] = []
    shelf = Shelf(2, evicted.append)
    for number in range(2):
        entry = placed(shelf, number)
        assert entry is not None
        entry.holds = 1
    assert placed(shelf, 2) is None
    assert (shelf.is_jammed, evicted) == (True, [])
    entry.holds = 0
    assert placed(shelf, 2) is not None
    assert evicted == [entry]


def test_a_record_that_is_dropped_while_it_is_held_is_found_no_more() -> None:
    shelf = Shelf(1, lambda _: None)
    entry = placed(shelf, 0)
    assert entry is not None
    entry.holds = 1
    shelf.drop(entry)
    assert shelf.find(entry.key) is None and shelf.has(entry.key)
    shelf.release(entry)
    assert not shelf.has(entry.key) and placed(shelf, 1) is not None
