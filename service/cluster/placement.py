"""Where a new sequence goes: to its longest cached prefix, unless that engine is too full or too
busy. Pure: what is known of the engines goes in, the chosen one comes out.

The cost of an engine is counted in pages: those of the prompt that are not cached there, which must
be computed and stored; a share of those that its sequences hold already, which every decode reads;
and the pages it could have computed in the time for which its queue makes callers wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HELD_WEIGHT: Final = 0.1
"""A page that an engine's sequences hold weighs so much of one that must be computed: a prompt goes
past an engine with 10 of its pages when that one holds 100 more than another."""
QUEUE_PAGES_PER_S: Final = 2000.0
"""Pages that a second of waiting is worth."""
FULL: Final = 0.95
"""An engine with more of its pages held than this takes no new sequence while others have less."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has, in pages; `free` and `cached` are there for new sequences."""

    free: int = 0
    cached: int = 0
    held: int = 0
    """Referenced or pinned."""
    queue_s: float = 0.0
    """How long calls have waited for their turn lately."""
    promised: int = 0
    """Placed there since these numbers were told."""

    @property
    def room(self) -> int:
        return self.free + self.cached - self.promised

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held


def choose(loads: Mapping[str, Load], matched: Mapping[str, int], needed: int) -> str:
    """The engine for a prompt of `needed` pages, of which `matched` are cached by engine.

    Equal costs go to the engine with the most room. Raises ValueError where there is no engine.
    """
    if not loads:
        raise ValueError("no engine to choose from: this is a bug")
    missing = {name: max(needed - matched.get(name, 0), 0) for name in loads}
    fitting = {name: load for name, load in loads.items() if fits(load, missing[name])}
    among = fitting or loads

    def rank(name: str) -> tuple[float, float, str]:
        load = among[name]
        return cost(load, missing[name]), -load.room, name

    return min(among, key=rank)


def cost(load: Load, missing: int) -> float:
    """In pages, with so many of the prompt not cached there."""
    held = HELD_WEIGHT * (load.held + load.promised)
    return missing + held + QUEUE_PAGES_PER_S * load.queue_s


def fits(load: Load, missing: int) -> bool:
    """Whether the prompt leaves the engine below what is full."""
    return load.held + load.promised + missing <= FULL * load.total


def spread(loads: Sequence[Load], least_free: float, most_queue_s: float) -> int:
    """How many engines there should be, by what these have: one more where they are short of pages
    or their callers wait, one less where that many would have room and nobody waits."""
    count = len(loads)
    if not count:
        return 1
    total = sum(load.total for load in loads)
    held = sum(load.held for load in loads)
    queue_s = max(load.queue_s for load in loads)
    if total and (held > (1.0 - least_free) * total or queue_s > most_queue_s):
        return count + 1
    room_without = total * (count - 1) / count
    idle = queue_s < most_queue_s / 4
    if count > 1 and idle and held < (1.0 - 2.0 * least_free) * room_without:
        return count - 1
    return count
