"""The rule that places a new sequence: on the engine with its longest cached prefix, unless that is
too full or too busy. A pure function of the engines' loads.

The cost of an engine is in seconds: to finish its work; to compute the pages of the prompt that it
has not cached, at its own pace; and to read what its sequences hold, as every decode does. Pages
that another engine has cost more: later calls wait while they are computed again, and they evict
others. Pages in host memory or on disk cost a part of computing them. The rule takes the numbers
of one engine, or arrays of many engines' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

ANSWER_TOKENS: Final = 75.0
"""Tokens of a typical answer: the pages that sequences hold are read once for each."""
AGAIN_WEIGHT: Final = 15.0
"""Weight of a second spent computing pages that another engine has, beside a second of waiting."""
EXTRA_WAIT_S: Final = 1.0
"""Extra wait that is worth it for an engine with all of a prompt; in proportion for a part."""
LOAD_SHARE: Final = 0.25
"""Cost of a page that an engine loads from a lower tier, as a share of one that it computes."""
MOST_WORK_S: Final = 60.0
"""Maximum work that an engine is assumed to have: an announced prompt may never come."""
FULL: Final = 0.95
"""Share of held pages above which an engine gets no new sequence while another is below it."""
NO_PACE: Final = 1e-4
"""Seconds per page where the engine has not reported its pace."""
FURTHEST: Final = 2.0
"""Maximum factor between an engine's pace and the median one. An engine that looks slow gets no
prompts, so it would never measure a better pace."""

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
Number = TypeVar("Number", float, NDArray[Any])
"""One engine's number, or an array with many engines' numbers."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an engine is, in seconds."""

    page_s: float = NO_PACE
    """To compute a page of a prompt, without attention to earlier pages."""
    pair_s: float = 0.0
    """On top for each earlier page."""
    read_s: float = NO_PACE / ANSWER_TOKENS
    """To read a page for the next token."""

    def span_s(self, first: Number, last: float) -> Number:
        """Seconds to compute the pages `first:last` of a prompt."""
        return (last - first) * (self.page_s + self.pair_s / 2 * (first + last))

    def near(self, others: Sequence[Pace]) -> Pace:
        """This pace, at most a factor of `FURTHEST` from the median of `others`."""
        every = [sorted(times) for times in zip(*(one.times for one in others), strict=True)]
        middles = [times[(len(times) - 1) // 2] for times in every]
        pairs = zip(self.times, middles, strict=True)
        return Pace(*(min(max(own, of / FURTHEST), of * FURTHEST) for own, of in pairs))

    @property
    def times(self) -> tuple[float, float, float]:
        return self.page_s, self.pair_s, self.read_s


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's pages and work. `free` and `cached` pages are available to new sequences."""

    free: int = 0
    cached: int = 0
    held: int = 0
    """Referenced or pinned."""
    queue_s: float = 0.0
    """Recent waiting time of calls."""
    work_s: float = 0.0
    """Seconds until the work from this door is done."""
    promised: int = 0
    """Pages placed there since the other numbers were reported."""
    pace: Pace = Pace()

    @property
    def room(self) -> int:
        return self.free + self.cached - self.promised

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held

    @property
    def wait_s(self) -> float:
        """The longer of both: `queue_s` includes the work from other doors."""
        return max(self.work_s, self.queue_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of `needed` pages, of which some engine has the first `most`."""

    needed: int
    most: int = 0

    def cost_s(
        self, there: Number, wait_s: Number, held: Number, pace: Pace, loaded: float = 0.0
    ) -> Number:
        """The cost of an engine that has the first `there` pages, `loaded` of them in lower tiers
        only."""
        missing_s = pace.span_s(there, self.needed)
        again_s = pace.span_s(there, self.most) if self.most else 0.0
        answer_s = ANSWER_TOKENS * pace.read_s * held
        extra_s = EXTRA_WAIT_S / self.needed * (self.most - there + LOAD_SHARE * loaded)
        if loaded:
            all_s = pace.span_s(there - loaded, self.needed)
            missing_s = missing_s + LOAD_SHARE * (all_s - missing_s)
        cost_s: Number = wait_s + answer_s + missing_s + AGAIN_WEIGHT * again_s + extra_s
        return cost_s


def busy_until_s(until_s: float, now_s: float, work_s: float) -> float:
    """When an engine will have finished, after `work_s` more work."""
    return min(max(until_s, now_s) + work_s, now_s + MOST_WORK_S)


def fits(held: Number, missing: Number, total: Number) -> Any:
    """Whether an engine stays below `FULL` with the missing pages."""
    return held + missing <= FULL * total


def choose(
    loads: Mapping[str, EngineLoad],
    matched: Mapping[str, int],
    needed: int,
    loaded: Mapping[str, int] = NOTHING,
) -> str:
    """The engine for a prompt of `needed` pages, of which each engine has cached `matched`,
    `loaded` of them in lower tiers only.

    Of equal costs the engine with the most room wins. Raises ValueError without engines.
    """
    if not loads:
        raise ValueError("no engine to choose from: this is a bug")
    there = {name: min(matched.get(name, 0), needed) for name in loads}
    prompt, ranks = Prompt(needed, max(there.values())), []
    for name, load in loads.items():
        first, held = there[name], float(load.held + load.promised)
        below = loaded.get(name, 0)
        is_full = not fits(held, float(needed - first + below), float(load.total))
        cost_s = prompt.cost_s(float(first), load.wait_s, held, load.pace, float(min(below, first)))
        ranks.append((is_full, cost_s, -load.room, name))
    return min(ranks)[-1]


def spread(loads: Sequence[EngineLoad], least_free: float, most_queue_s: float) -> int:
    """The number of engines to run, from the loads of the present ones: one more where pages are
    short or callers wait, one fewer where the rest would have room and no call waits."""
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
