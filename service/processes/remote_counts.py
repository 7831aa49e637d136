"""What engines that are no processes of this service have counted, as they told it last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from service.processes.cells import Key

BETWEEN: Final = "/"
"""Stands between the name of a metric and its labels."""
MOST_ENGINES: Final = 256
"""Of engines beyond that, the counts of those that told theirs longest ago become one."""
Counts = Mapping[str, Sequence[float]]


def as_told(blocks: Mapping[Key, Sequence[float]]) -> dict[str, list[float]]:
    """Counts as an engine tells them; what it has not met yet is left out."""
    met = {key: block for key, block in blocks.items() if any(block)}
    return {BETWEEN.join(key): list(map(short, block)) for key, block in met.items()}


def short(value: float) -> float:
    return int(value) if value.is_integer() else value


class Elsewhere:
    """By the tags of engines, which those that were started anew have others of. Counters stay when
    an engine has gone, gauges go with it."""

    def __init__(self, size_of: Callable[[str], int], is_gauge: Callable[[str], bool]) -> None:
        """`size_of` a metric's series, by its name; 0 of one that is not known here."""
        self._size_of = size_of
        self._is_gauge = is_gauge
        self._engines: OrderedDict[str, dict[Key, Sequence[float]]] = OrderedDict()
        self._gone: dict[Key, list[float]] = {}

    def take(self, tag: str, counts: Counts) -> None:
        """An engine has told what it has counted since its start."""
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
                before = self._gone.get(key, [0.0] * len(block))
                self._gone[key] = [a + b for a, b in zip(before, block, strict=True)]

    def __iter__(self) -> Iterator[Mapping[Key, Sequence[float]]]:
        """The blocks of each, and of those that have gone."""
        yield from self._engines.values()
        yield self._gone
