"""What a door calls: one engine (`Link`) or several behind a router; it cannot tell which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attnd.wire.dtypes import Part

from config.server import ServerSettings
from service.doors.kit.answer_shares import AnswerShares
from service.metrics import Metrics
from service.operations.schema.spec import Operation
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import Tenant


class Upstream(Protocol):
    """Slots for requests and answers, all in one arena, and calls of operations."""

    limits: ServerSettings
    draining: str
    """Why no more requests are taken; empty while they are."""
    answers: AnswerShares

    async def connect(self, path: str, name: str, secret: str) -> None:
        """Meet what is called, as a door by the service's secret.

        Raises OSError, NotReady, FrameError.
        """

    @property
    def state(self) -> tuple[str, str]:
        """`starting`, `ready`, `draining` or `lost`, and why."""

    def ready(self) -> object:
        """Raises NotReady unless requests are served."""

    @property
    def arena_fd(self) -> int:
        """The arena's file, for a process beside the door. Raises NotReady."""

    def check_heard(self) -> None:
        """Raises NotReady where no engine has been heard for a while."""

    def take(self, size: int) -> Slot:
        """A slot from what the arena has now. Raises ArenaFull."""

    async def slot(self, size: int, *, exactly: bool = False) -> Slot:
        """A slot, not much larger if `exactly`; the arena grows for it as far as it may.

        Raises Overloaded, NotReady.
        """

    async def lay(self, parts: Sequence[Part]) -> tuple[Slot, int]:
        """An image's parts in a slot, and its length. Raises Overloaded, NotReady."""

    def give_back(self, slot: Slot) -> None:
        """Give up a slot that nothing here refers to any more; a call may still hold it."""

    async def call(
        self,
        operation: Operation,
        request: Slot,
        length: int,
        most: int,
        deadline_us: int,
        request_id: bytes,
        tenant: Tenant,
    ) -> tuple[Answered, Slot]:
        """The answer, of at most `most` bytes, and the slot that it lies in.

        Raises AnswerTooLarge, Overloaded, NotReady; what an engine refuses is an answer too.
        """

    def trim(self) -> None:
        """Give memory that nobody uses back to the system."""

    def close(self) -> None:
        """End the sessions."""


MakeUpstream = Callable[[ServerSettings, bool, Metrics | None], Upstream]
"""From a door's limits, whether it has keys, so that calls are made for the tenants who showed
them, and where it counts; called on the door's event loop."""
