"""The ledger of what calls leave behind: counts and limits by namespace, and turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.store.imports import UnfinishedImports
from service.engine.store.ledger import Backlog, Kind, Ledger
from service.errors import Overloaded

NOTES = Kind("notes", 10, "wait")
LOADS = Kind("loads", 100, "release leases")


def test_a_namespace_has_its_share_of_each_kind() -> None:
    ledger = Ledger(0.5)
    ledger.add(NOTES, "a", 4)
    ledger.refuse(NOTES, "a")
    with pytest.raises(Overloaded, match=r"4 notes .* with 2 more exceed .* 10: wait") as caught:
        ledger.refuse(NOTES, "a", 2)
    assert caught.value.extra["retry_after_s"] == 1.0
    assert (ledger.room(LOADS, "a"), ledger.room(LOADS, "a", among=4)) == (50, 25)
    ledger.add(NOTES, "b", 5)
    assert (ledger.count(NOTES, "a"), ledger.room(NOTES, "a"), ledger.room(NOTES, "c")) == (4, 1, 1)
    ledger.add(NOTES, "a", -4)
    assert (ledger.count(NOTES, "a"), ledger.room(NOTES, "a")) == (0, 5)
    assert Ledger(0.05).room(NOTES, "a") == 1, "a share is one at least"


def test_the_newest_item_of_a_name_waits_in_its_place_and_counts_once() -> None:
    ledger = Ledger(0.2)
    backlog: Backlog[str] = Backlog(ledger, NOTES)
    for name, item in (("x", "old"), ("y", "y"), ("x", "new")):
        backlog.refuse("a", name)
        backlog.put("a", name, item)
    with pytest.raises(Overloaded):
        backlog.refuse("a", "z")
    backlog.refuse("a", "y")
    backlog.put("b", "x", "newest")
    assert ledger.count(NOTES, "b") == 0
    assert backlog.take(9) == [("a", "x", "newest"), ("a", "y", "y")]
    assert (len(backlog), ledger.count(NOTES, "a")) == (0, 0)
    backlog.refuse("a", "z")


def test_a_namespace_with_few_items_does_not_wait_for_one_with_many() -> None:
    backlog: Backlog[None] = Backlog(Ledger(), LOADS)
    for number in range(50):
        backlog.put("many", number, None)
    backlog.take(20)
    backlog.put("few", 0, None)
    backlog.put("few", 1, None)
    taken = [namespace for namespace, _, _ in backlog.take(4)]
    assert sorted(taken) == ["few", "few", "many", "many"]
    assert len(backlog) == 28


def test_unfinished_imports_are_counted_until_each_has_ended() -> None:
    imports = UnfinishedImports({"~x", "~y", "~z"})  # type: ignore[arg-type]
    begun: Any = [
        SimpleNamespace(name=name, namespace=space, hidden=f"~{name}")
        for name, space in (("x", "a"), ("y", "a"), ("z", "b"))
    ]
    for one in begun:
        imports.add(one)
    for one, left in zip(begun, ([1, 1], [0, 1], [0, 0]), strict=True):
        imports.remove(one)
        assert [imports.count(space) for space in "ab"] == left
        assert imports.count(None) == sum(left)
