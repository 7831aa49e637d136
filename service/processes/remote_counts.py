"""Counts of engines that are not processes of this service, as they last reported them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from service.processes.cells import Key

BETWEEN: Final = "/"
"""Separates a metric's name and its labels."""
MOST_ENGINES: Final = 256
"""Beyond this, the counts of the engines with the oldest reports are added up."""
Counts = Mapping[str, Sequence[float]]


def as_reported(blocks: Mapping[Key, Sequence[float]]) -> dict[str, list[float]]:
    """Counts as an engine reports them, without those that are 0."""
    counted = {key: block for key, block in blocks.items() if any(block)}
    return {BETWEEN.join(key): list(map(short, block)) for key, block in counted.items()}


def short(value: float) -> float:
    return int(value) if value.is_integer() else value


class RemoteCounts:
    """Counts by the tag of each engine; a restarted engine has another tag. When an engine is lost,
    its counters stay, and its gauges are dropped."""

    def __init__(self, size_of: Callable[[str], int], is_gauge: Callable[[str], bool]) -> None:
        """`size_of`: cells of a metric's series, by its name; 0 for an unknown metric."""
        self._size_of = size_of
        self._is_gauge = is_gauge
        self._engines: OrderedDict[str, dict[Key, Sequence[float]]] = OrderedDict()
        self._folded: dict[Key, list[float]] = {}

    def take(self, tag: str, counts: Counts) -> None:
        """An engine has reported its counts since its start."""
        found = {tuple(name.split(BETWEEN)): block for name, block in counts.items()}
        self._engines[tag] = {
            key: block for key, block in found.items() if self._size_of(key[0]) == len(block)
        }
        self._engines.move_to_end(tag)
        if len(self._engines) > MOST_ENGINES:
            self._fold(*self._engines.popitem(last=False))

    def lose(self, tag: str) -> None:
        """An engine can no longer be called."""
        blocks = self._engines.get(tag, {})
        for key in [key for key in blocks if self._is_gauge(key[0])]:
            del blocks[key]

    def _fold(self, tag: str, blocks: Mapping[Key, Sequence[float]]) -> None:
        for key, block in blocks.items():
            if not self._is_gauge(key[0]):
                before = self._folded.get(key, [0.0] * len(block))
                self._folded[key] = [a + b for a, b in zip(before, block, strict=True)]

    def __iter__(self) -> Iterator[Mapping[Key, Sequence[float]]]:
        """The blocks of each engine, and of those that were added up."""
        yield from self._engines.values()
        yield self._folded
