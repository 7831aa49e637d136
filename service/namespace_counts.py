"""What each namespace holds and does: the namespaces with most pages by name, the others as one.

A namespace counts under its own name from its first call on while there is room, and later as
long as it is among those with most pages. Its counters begin at 0 whenever it gets a name, and end
when another one takes its place: rates are right, and no number of namespaces grows the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from typing import Final

from service.families import BY_NAMESPACE, Spec
from service.processes.cells import Cells, Key, add_block
from service.processes.slots import NamedSlots, read_slots, size_of_slots

NAMED: Final = 64
"""Maximum number of namespaces with series of their own."""
OTHER: Final = "other"
"""The label of all the others; a namespace of this name is one of them."""
BLOCK: Final = ("namespaces",)


def keys_of(name: str, spec: Spec) -> list[Key]:
    return [(name, value) for value in spec.values] or [(name,)]


SERIES: Final = tuple(key for name, spec in BY_NAMESPACE.items() for key in keys_of(name, spec))
"""The cells of a namespace: the family, and the value of its label behind `namespace`."""
AT: Final = {series: index for index, series in enumerate(SERIES)}
REQUESTS: Final = AT["namespace_requests",]
QUEUE_S: Final = AT["namespace_queue_seconds",]
APPENDED: Final = AT["namespace_tokens_appended",]
HIT, MISS = (AT["namespace_prefix_tokens", result] for result in ("hit", "miss"))
REJECTED: Final = {key[1]: at for key, at in AT.items() if key[0] == "namespace_rejected"}
GAUGES: Final = sum(BY_NAMESPACE[key[0]].kind == "gauge" for key in SERIES)
"""The first cells: pages referenced, cached and pinned, and sequences."""
NONE_HELD: Final = (0,) * GAUGES

Held = tuple[int, ...]
"""Values of the gauges."""


class NamespaceCounts:
    """The counts of one process, in its cells."""

    def __init__(self, cells: Cells) -> None:
        block = cells.block(BLOCK, size_of_slots(NAMED + 1, len(SERIES)))
        self._slots = NamedSlots(block, len(SERIES))
        if OTHER not in self._slots.by_name:
            self._slots.claim(OTHER)
        self._hold(dict.fromkeys(self._slots.by_name, NONE_HELD))

    def of(self, namespace: str) -> memoryview[float]:
        """The cells that count for a namespace; for the service's own calls (no name), `OTHER`."""
        found = self._slots.by_name.get(namespace or OTHER)
        if found is None:
            found = self._slots.claim(namespace)
        return self._slots.by_name[OTHER] if found is None else found

    def rejected(self, namespace: str, code: str) -> None:
        """Count an error of a namespace, if it is a rejection."""
        if (at := REJECTED.get(code)) is not None:
            self.of(namespace)[at] += 1.0

    def looked_up(self, namespace: str, tokens: int, found: int) -> None:
        """Count tokens that were looked up, and found."""
        cells = self.of(namespace)
        cells[HIT] += found
        cells[MISS] += tokens - found

    def hold(
        self, pages: Iterable[tuple[int, str]], held: Callable[[str], Held], total: Held
    ) -> None:
        """Set what every namespace holds. Those with most pages get names.

        `pages`: each namespace's pages and name. `held`: pages referenced, cached and pinned, and
        sequences of a namespace; `total`: those of all together.
        """
        shown = self._slots.by_name
        top = {name for count, name in nlargest(NAMED, pages) if count and name != OTHER}
        for name in top - shown.keys():
            if self._slots.claim(name) is None:
                lower = (one for one in shown if one not in top and one != OTHER)
                self._slots.claim(name, instead_of=min(lower, key=lambda one: sum(held(one)[:-1])))
        own = {name: held(name) for name in shown if name != OTHER}
        self._hold(
            own
            | {
                OTHER: tuple(
                    whole - sum(some) for whole, *some in zip(total, *own.values(), strict=True)
                )
            }
        )

    def _hold(self, held: Mapping[str, Held]) -> None:
        for name, numbers in held.items():
            cells = self._slots.by_name[name]
            for at, number in enumerate(numbers):
                cells[at] = number


def series_in(block: memoryview[float]) -> dict[Key, list[float]]:
    """The series of a process's namespaces: family, namespace and further label."""
    return {
        (family, namespace, *value): [cells[at]]
        for namespace, cells in read_slots(block, len(SERIES)).items()
        for at, (family, *value) in enumerate(SERIES)
    }


def bounded(sums: Mapping[Key, list[float]]) -> dict[Key, list[float]]:
    """The series of a cluster's engines together, again for at most `NAMED` names."""
    pages: dict[str, float] = {}
    for (family, namespace, *_), (value,) in sums.items():
        is_pages = family == "namespace_kv_pages"
        pages[namespace] = pages.get(namespace, 0.0) + (value if is_pages else 0.0)
    pages.pop(OTHER, None)
    named = set(nlargest(NAMED, pages, lambda name: (pages[name], name)))
    found: dict[Key, list[float]] = {}
    for (family, namespace, *label), cells in sums.items():
        key = (family, namespace if namespace in named else OTHER, *label)
        add_block(found, key, cells)
    return found
