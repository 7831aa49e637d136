"""Every outcome of routing a request to an engine, what happens then, and the one retry loop.

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
engine is tried once for FULL and LOST. Engines report errors in one way: they raise.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol, TypeVar

from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady, Overloaded

FULL_STATUSES: Final = frozenset({429, 503, 507})
MAX_TRIES: Final = 64
"""Attempts of a call, more than engines: ids may go between two looks."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Outcome(Enum):
    """How an attempt to reach an engine has ended; OK is a reply, the others are errors."""

    OK = auto()
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


class Attempts(Protocol[T_co]):
    """A call on its way: how it is attempted, and prepared to be attempted again."""

    async def attempt(self) -> T_co:
        """Raises ProblemText, AttndError."""

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        """Prepares the next attempt. Raises `error`, or a better one, where there must be none."""


async def retried(attempts: Attempts[T]) -> T:
    """The reply of the first attempt that succeeds. Raises as the table above says."""
    for left in reversed(range(MAX_TRIES)):
        try:
            return await attempts.attempt()
        except (ProblemText, AttndError) as error:
            if not left:
                raise
            await attempts.recover(outcome_of(error), error)
    raise RuntimeError("the last attempt returns or raises: this is a bug")
