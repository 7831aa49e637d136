"""A router's index of cached blocks, made of events alone, and the engine's own lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from service.engine.store.event_history import EventHistory, Page

if TYPE_CHECKING:
    from service.engine.store.store import Store


def read_page(history: EventHistory, namespace: str, after: int, limit: int) -> Page:
    """Events, the number of the last one, and whether some were dropped before."""
    reading = history.read(namespace, after, limit)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            page: Page = end.value
            return page


class BlockIndex:
    """The blocks that a service has by medium, as events report them."""

    def __init__(self) -> None:
        self._blocks: defaultdict[str, set[bytes]] = defaultdict(set)
        self.last = 0
        """Number of the last event."""
        self.resets = 0

    @property
    def by_medium(self) -> dict[str, set[bytes]]:
        return {medium: self._blocks[medium] for medium in ("GPU", "CPU", "DISK")}

    @property
    def blocks(self) -> set[bytes]:
        """The blocks of the pool."""
        return self._blocks["GPU"]

    def reset(self) -> None:
        self._blocks.clear()
        self.resets += 1

    def take_page(self, page: Mapping[str, Any]) -> None:
        """A reply of `events`."""
        if page["too_old"]:
            self.reset()
        for event in page["events"]:
            self.take(event)
        self.last = page["next"]

    def take(self, event: Mapping[str, Any]) -> None:
        """An event, of `events` or of the stream."""
        self.last = event["id"]
        match event["type"]:
            case "stored":
                self._blocks[event["medium"]].update(map(bytes.fromhex, event["page_keys"]))
            case "removed":
                self._blocks[event["medium"]].difference_update(
                    map(bytes.fromhex, event["page_keys"])
                )
            case "cleared" | "too_old":
                self.reset()


def blocks_of(store: Store, namespace: str = "default") -> dict[str, set[bytes]]:
    """The pages of a namespace that an engine has, by medium."""
    named, found = store.tree.cache.named, defaultdict[str, set[bytes]](set)
    for node in filter(None, named.nodes):
        if node.name is not None and node.name.root.namespace.name == namespace:
            found["GPU"].update(map(named.key_of, node.pages.tolist()))
    if store.loading is not None:
        tiers = store.loading.tiers
        disk = [] if tiers.disk.store is None else tiers.disk.store.records()
        for medium, entries in (("CPU", tiers.host if tiers.host.keeps else ()), ("DISK", disk)):
            own = [one for one in entries if one.namespace == namespace and one.is_ready]
            found[medium] = {one.tag[:16] for one in own}
    return {medium: found[medium] for medium in ("GPU", "CPU", "DISK")}
