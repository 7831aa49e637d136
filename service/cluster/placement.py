"""Where a new sequence goes: to its longest cached prefix, unless that engine is too full or too
busy. Pure: what is known of the engines goes in, the chosen one comes out.

The cost of an engine is counted in pages: those of the prompt that are not cached there, which must
be computed and stored, and more for those that another engine has, which would push others out
twice; a share of those that its sequences hold already, which every decode reads; some for every
call that it is at, and for their rows; and some for the time for which its queue has made callers
wait, which the calls of other doors lengthen too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HELD_WEIGHT: Final = 0.1
"""A page that an engine's sequences hold weighs so much of one that must be computed: a prompt goes
past an engine with 10 of its pages when that one holds 100 more than another."""
ELSEWHERE_WEIGHT: Final = 2.0
"""A page that another engine has weighs so much on top: a chat stays where it is."""
CALL_PAGES: Final = 4.0
"""Pages that a call under way is worth."""
BODY_WEIGHT: Final = 0.15
"""What a call under way sends weighs so much of as many bytes of keys and values. With four heads
of q to one of k and v a page of a prompt is three of these: half of it is still to be done."""
QUEUE_PAGES_PER_S: Final = 500.0
"""Pages that a second of waiting is worth: what calls waited lately changes faster than chats may
be moved."""
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
    calls: int = 0
    """That this door waits for."""
    bodies: float = 0.0
    """What they sent, as pages of keys and values."""
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
    there = {name: min(matched.get(name, 0), needed) for name in loads}
    most = max(there.values())
    among = {name: load for name, load in loads.items() if fits(load, needed - there[name])}

    def rank(name: str) -> tuple[float, float, str]:
        pages = needed - there[name] + ELSEWHERE_WEIGHT * (most - there[name])
        return pages + cost(loads[name]), -loads[name].room, name

    return min(among or loads, key=rank)


def cost(load: Load) -> float:
    """Of what an engine has to do already, in pages."""
    calls = CALL_PAGES * load.calls + BODY_WEIGHT * load.bodies
    return HELD_WEIGHT * (load.held + load.promised) + calls + QUEUE_PAGES_PER_S * load.queue_s


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
