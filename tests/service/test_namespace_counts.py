"""Counts by namespace: the largest by name, the others as one, whatever names come and go."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import Metrics, series_of
from service.namespace_counts import BLOCK, NAMED, OTHER, REQUESTS, SERIES, NamespaceCounts
from service.processes.cells import Cells, make_shared
from service.processes.slots import NamedSlots, read_slots, size_of_slots

Found = dict[tuple[str, ...], float]


def found(metrics: Metrics) -> Found:
    """(family, namespace, further label) -> value, of every series by namespace."""
    return {
        (sample.name.removeprefix("attnd_namespace_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if "namespace" in sample.labels
    }


def hold(counts: NamespaceCounts, pages: Mapping[str, int]) -> None:
    """Each namespace has one sequence that holds so much."""
    given = [(count, name) for name, count in pages.items()]
    total = (sum(pages.values()), 0, 0, len(pages))
    counts.hold(given, lambda name: (pages.get(name, 0), 0, 0, int(name in pages)), total)


def names(metrics: Metrics) -> set[str]:
    return {key[1] for key in found(metrics)}


def test_the_namespaces_with_most_pages_have_names_and_the_sums_are_whole() -> None:
    metrics = Metrics()
    pages = {f"n{number}": number for number in range(1, 201)}
    for name in pages:  # the first come first, but hold least
        metrics.namespaces.of(name)[REQUESTS] += 1
    hold(metrics.namespaces, pages)
    shown = found(metrics)
    assert names(metrics) == {OTHER, *(f"n{number}" for number in range(137, 201))}
    assert shown["kv_pages", "n200", "referenced"] == 200
    assert shown["kv_pages", OTHER, "referenced"] == sum(range(1, 137))
    assert shown["sequences", OTHER] == 136
    assert shown["requests_total", OTHER] == 136
    metrics.namespaces.of("n200")[REQUESTS] += 1
    assert found(metrics)["requests_total", "n200"] == 1, "a name's counter begins at 0"
    hold(metrics.namespaces, {"n1": 5})
    after = found(metrics)
    assert after["kv_pages", "n1", "referenced"] == 5
    assert after["kv_pages", "n200", "referenced"] == after["kv_pages", OTHER, "referenced"] == 0


def test_a_namespace_named_like_the_others_is_one_of_them() -> None:
    metrics = Metrics()
    for name in (OTHER, ""):  # the service's own calls have no namespace
        metrics.namespaces.of(name)[REQUESTS] += 1
    hold(metrics.namespaces, {OTHER: 7, "a": 1})
    shown = found(metrics)
    assert (shown["kv_pages", OTHER, "referenced"], shown["requests_total", OTHER]) == (7, 2)
    assert names(metrics) == {OTHER, "a"}


def test_names_that_come_and_go_for_ever_take_no_more_memory() -> None:
    cells = Cells()
    counts = NamespaceCounts(cells)
    for number in range(5000):
        hold(counts, {f"{number}-{'x' * 50}-{one}": 1 + one for one in range(3)})
    assert [key for key in cells.read() if key != BLOCK] == []
    assert len({key[1] for key in series_of(cells)}) == NAMED + 1


def test_a_restarted_engine_keeps_the_counters_and_holds_nothing() -> None:
    fd = make_shared()
    first = Metrics("engine", {"engine": fd})
    first.namespaces.of("a")[REQUESTS] += 3
    hold(first.namespaces, {"a": 4})
    second = Metrics("engine", {"engine": fd})
    second.namespaces.of("a")[REQUESTS] += 1
    shown = found(second)
    assert (shown["requests_total", "a"], shown["kv_pages", "a", "referenced"]) == (4, 0)


def test_a_cluster_adds_its_engines_up_and_is_bounded_too() -> None:
    door = Metrics("http-0")
    for engine in range(3):
        there = Metrics()
        pages = {f"e{engine}-{number}": 1 + number for number in range(50)} | {"all": 100}
        for name in pages:
            there.namespaces.of(name)[REQUESTS] += 1
        hold(there.namespaces, pages)
        door.remote.take(str(engine), there.own())
    shown = found(door)
    assert shown["kv_pages", "all", "referenced"] == 300 and shown["requests_total", "all"] == 3
    assert len(names(door)) == NAMED + 1
    total = sum(value for key, value in shown.items() if key[0] == "kv_pages")
    assert total == 3 * (sum(range(1, 51)) + 100)
    assert sum(value for key, value in shown.items() if key[0] == "requests_total") == 3 * 51


@pytest.mark.parametrize("version", [1.0, 3.0])
def test_a_change_that_was_cut_off_shows_nothing_and_its_successor_begins_again(
    version: float,
) -> None:
    width = len(SERIES)
    block = Cells().block(BLOCK, size_of_slots(2, width))
    assert NamedSlots(block, width).claim("a") is not None
    assert read_slots(block, width).keys() == {"a"}
    block[0] = version
    assert read_slots(block, width) == {}
    successor = NamedSlots(block, width)
    assert successor.by_name == {}
    assert successor.claim("b") is not None and successor.claim("c") is not None
    assert successor.claim("d") is None, "there are two slots"
    assert successor.claim("d", instead_of="b") is not None
    assert read_slots(block, width).keys() == {"c", "d"}
