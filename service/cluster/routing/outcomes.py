"""Every outcome of routing a request to an engine, what happens then, and the one retry loop.

Outcome  the engine's reply         sequences that exist                new sequences, imports
OK       2xx                        return it                           return it, remember where
UNKNOWN  404 unknown_sequence       ask all engines, try where it is    the same, for a parent
MOVING   503 sequence_moving        wait 3 ms; after 0.5 s settle a     the same
                                    move that its door has abandoned
FULL     429, 507, any other 503    raise it; a 507 names the engines   try the next engine
                                    that have room
LOST     none: the session ended    410 lost_sequence once the engine   try the next engine
                                    is known to be dead, before 503
REFUSED  any other error, and any   raise it                            raise it
         with `done`, of which a
         part took effect

A sequence that no engine has is a 404, or a 410 where its engine is dead: see `Locator.find`.
All retries of a call for UNKNOWN and MOVING share one budget of time, `RETRY_BUDGET_S`. Each
engine is tried once for FULL and LOST. Engines report errors in one way: they raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeVar

from service.cluster.membership.engine import Call
from service.doors.kit.problems import ProblemText
from service.errors import AttndError, NotReady, Overloaded
from service.tenants import Tenant

RETRY_PAUSE_S: Final = 0.003
SETTLE_AFTER_S: Final = 0.5
FULL_STATUSES: Final = frozenset({429, 503, 507})
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Outcome(Enum):
    """How an attempt to reach an engine has ended; OK is a reply, the others are errors."""

    OK = auto()
    UNKNOWN = auto()
    MOVING = auto()
    FULL = auto()
    LOST = auto()
    REFUSED = auto()


BY_CODE: Final = {
    "unknown_sequence": Outcome.UNKNOWN,
    "sequence_moving": Outcome.MOVING,
}
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
    by_status = Outcome.FULL if problem["status"] in FULL_STATUSES else Outcome.REFUSED
    return BY_CODE.get(problem["code"], by_status)


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


class Retries:
    """The retry loop of a router."""

    def __init__(self, settle: Callable[[str, Tenant], Coroutine[Any, Any, None]]) -> None:
        """`settle(id, tenant)` decides where a sequence is whose move was abandoned."""
        self.settle = settle
        self.settling: dict[tuple[str, str], asyncio.Task[None]] = {}
        """By namespace and id: the calls that wait for a sequence share one."""

    async def run(self, call: Call, attempts: Attempts[T]) -> T:
        """The reply of the first attempt that succeeds. Raises as the table above says."""
        while True:
            try:
                return await attempts.attempt()
            except (ProblemText, AttndError) as error:
                outcome = outcome_of(error)
                if outcome is Outcome.MOVING and call.may_retry():
                    await self.wait_for_move(call, error)
                else:
                    await attempts.recover(outcome, error)

    async def wait_for_move(self, call: Call, error: Exception) -> None:
        """Waits a moment; settles a move that has been waited for too long."""
        handed = error.problem.get("handed", ()) if isinstance(error, ProblemText) else ()
        if call.retrying_s > SETTLE_AFTER_S:
            for name in handed:
                await self.settle_once(name, call.tenant)
        await asyncio.sleep(RETRY_PAUSE_S)

    async def settle_once(self, name: str, tenant: Tenant) -> None:
        key = tenant.namespace, name
        if (task := self.settling.get(key)) is None:
            task = self.settling[key] = asyncio.create_task(self.try_to_settle(name, tenant))
            task.add_done_callback(lambda _: self.settling.pop(key))
        await asyncio.shield(task)

    async def try_to_settle(self, name: str, tenant: Tenant) -> None:
        """Where that fails, the calls try again."""
        with suppress(ProblemText, AttndError):
            await self.settle(name, tenant)
