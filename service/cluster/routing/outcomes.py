"""Every outcome of routing a request to an engine, and what happens then.

Outcome  the engine's reply         sequences that exist                new sequences, imports
OK       2xx                        return it                           return it
UNKNOWN  404 unknown_sequence       forget the id, ask all engines      the same, for a parent
                                    once, try where it is
FULL     429, 503, 507              raise it; a 507 names the engines   try the next engine
                                    that have room
LOST     none: the session ended    410 lost_sequence once the engine   try the next engine, unless
                                    is known to be dead, before 503     it may have made chosen ids
REFUSED  any other error, and any   raise it                            raise it
         with `done`, of which a
         part took effect

A sequence that no engine has is a 404, or a 410 where its engine is dead: see `Ids.find`. Each
engine is tried once for FULL and LOST. Engines report errors in one way: they raise. The retry
loops are `SequenceCalls.at_home`, `Creation.run` and `begin_import`.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from service.doors.kit.problems import ProblemText
from service.errors import NotReady, Overloaded

FULL_STATUSES: Final = frozenset({429, 503, 507})


class Outcome(Enum):
    """How an attempt to reach an engine has failed."""

    UNKNOWN = auto()
    FULL = auto()
    LOST = auto()
    REFUSED = auto()


NEXT_ENGINE: Final = frozenset({Outcome.FULL, Outcome.LOST})
"""Another engine may do what this one did not."""


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of an engine's error, or of the loss of its session."""
    if isinstance(error, NotReady):
        return Outcome.LOST
    if isinstance(error, Overloaded):
        return Outcome.FULL
    if not isinstance(error, ProblemText) or "done" in (problem := error.problem):
        return Outcome.REFUSED
    if problem["code"] == "unknown_sequence":
        return Outcome.UNKNOWN
    return Outcome.FULL if problem["status"] in FULL_STATUSES else Outcome.REFUSED


def unknown_ids(error: BaseException) -> list[str]:
    """The sequences that an engine does not have."""
    if isinstance(error, ProblemText) and outcome_of(error) is Outcome.UNKNOWN:
        return list(error.problem["sequences"])
    return []
