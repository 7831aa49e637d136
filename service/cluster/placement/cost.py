"""Where a new sequence goes: to its longest cached prefix, unless that engine is too full or too
busy. Pure: what is known of the engines goes in, the chosen one comes out.

The cost of an engine is counted in seconds: until what it has been given is done; to compute the
pages of the prompt that are not cached there, at the engine's own pace; and for what its sequences
hold, which every decode reads. Pages that another engine has cost more than that, since everybody
behind waits while they are computed again, and they push others out. The rule is arithmetic alone,
so that one engine's numbers may be asked about or arrays of many engines'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

ANSWER_TOKENS: Final = 75.0
"""What an engine's sequences hold is read for each of so many tokens: an answer's, about."""
AGAIN_WEIGHT: Final = 15.0
"""A second of computing what another engine has weighs so much more than one of waiting."""
PATIENCE_S: Final = 1.0
"""So much longer a prompt waits for an engine that has all of it; in proportion for a part."""
MOST_WORK_S: Final = 60.0
"""No engine is thought to be busy for longer: a prompt may be announced that never comes."""
FULL: Final = 0.95
"""An engine with more of its pages held than this takes no new sequence while others have less."""
NO_PACE: Final = 1e-4
"""Seconds for a page where the engine has not told its pace."""
FURTHEST: Final = 2.0
"""No engine counts as more times slower or faster than the middle one: what a busy moment has told
would last, since an engine that gets no prompts measures nothing better."""

Number = TypeVar("Number", float, NDArray[Any])
"""One engine's, or many engines'."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that an engine takes."""

    page_s: float = NO_PACE
    """For a page of a prompt by itself,"""
    pair_s: float = 0.0
    """for every page before it on top,"""
    read_s: float = NO_PACE / ANSWER_TOKENS
    """and to read a page for the next token."""

    def span_s(self, first: Number, last: float) -> Number:
        """For the pages `first:last` of a prompt."""
        return (last - first) * (self.page_s + self.pair_s / 2 * (first + last))

    def near(self, others: Sequence[Pace]) -> Pace:
        """This one, no further from the middle of these than may be."""
        every = [sorted(times) for times in zip(*(one.times for one in others), strict=True)]
        middles = [times[(len(times) - 1) // 2] for times in every]
        pairs = zip(self.times, middles, strict=True)
        return Pace(*(min(max(own, of / FURTHEST), of * FURTHEST) for own, of in pairs))

    @property
    def times(self) -> tuple[float, float, float]:
        return self.page_s, self.pair_s, self.read_s


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has, in pages; `free` and `cached` are there for new sequences."""

    free: int = 0
    cached: int = 0
    held: int = 0
    """Referenced or pinned."""
    queue_s: float = 0.0
    """How long calls have waited for their turn lately."""
    work_s: float = 0.0
    """Until what this door has given it is done."""
    promised: int = 0
    """Placed there since these numbers were told."""
    pace: Pace = Pace()

    @property
    def room(self) -> int:
        return self.free + self.cached - self.promised

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held

    @property
    def wait_s(self) -> float:
        """The longer of what is known: other doors give it work too, which calls wait for."""
        return max(self.work_s, self.queue_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's pages, and how many of the first `most` engines have that have the most of it."""

    needed: int
    most: int = 0

    def cost_s(self, there: Number, wait_s: Number, held: Number, pace: Pace) -> Number:
        """What an engine costs that has the first pages, so many of them `there`."""
        missing_s = pace.span_s(there, self.needed)
        again_s = pace.span_s(there, self.most)
        answer_s = ANSWER_TOKENS * pace.read_s * held
        patience_s = PATIENCE_S / self.needed * (self.most - there)
        cost_s: Number = wait_s + answer_s + missing_s + AGAIN_WEIGHT * again_s + patience_s
        return cost_s


def busy_until_s(until_s: float, now_s: float, work_s: float) -> float:
    """When an engine will be done that has been given more work."""
    return min(max(until_s, now_s) + work_s, now_s + MOST_WORK_S)


def fits(held: Number, missing: Number, total: Number) -> Any:
    """Whether so many more pages leave an engine below what is full."""
    return held + missing <= FULL * total


def choose(loads: Mapping[str, Load], matched: Mapping[str, int], needed: int) -> str:
    """The engine for a prompt of `needed` pages, of which `matched` are cached by engine.

    Equal costs go to the engine with the most room. Raises ValueError where there is no engine.
    """
    if not loads:
        raise ValueError("no engine to choose from: this is a bug")
    there = {name: min(matched.get(name, 0), needed) for name in loads}
    prompt = Prompt(needed, max(there.values()))
    among = {
        name: load
        for name, load in loads.items()
        if fits(float(load.held + load.promised), float(needed - there[name]), float(load.total))
    }

    def rank(name: str) -> tuple[float, float, str]:
        load = loads[name]
        held = float(load.held + load.promised)
        cost_s = prompt.cost_s(float(there[name]), load.wait_s, held, load.pace)
        return cost_s, -load.room, name

    return min(among or loads, key=rank)


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
