"""The retry loop: what many calls for one moving sequence do together."""

from __future__ import annotations

import asyncio
from typing import Any

from service.cluster.membership.engine import NO_IMAGE, Call
from service.cluster.routing.outcomes import SETTLE_AFTER_S, Outcome, Retries
from service.doors.kit.problems import ProblemText
from service.errors import SequenceMoving, problem
from service.image.json_text import dump_json
from service.operations.sequences import GET_SEQUENCE
from service.tenants import OPEN, Tenant, tenant_of


class Moves:
    """The attempts of a call for a sequence that moves until it is settled."""

    def __init__(self, settled: set[str]) -> None:
        self.settled = settled

    async def attempt(self) -> str:
        if "one" in self.settled:
            return "done"
        raise ProblemText(dump_json(problem(SequenceMoving(["one"], ["one"]))))

    async def recover(self, outcome: Outcome, error: Exception) -> None:
        raise error


async def test_calls_that_wait_for_one_sequence_settle_it_once() -> None:
    settled: set[str] = set()
    settling: list[str] = []

    async def settle(name: str, tenant: Tenant) -> None:
        settling.append(tenant.namespace)
        await asyncio.sleep(0.05)
        if settling.count(tenant.namespace) == 1:
            raise SequenceMoving([name])  # tried again
        settled.add(name)

    retries = Retries(settle)
    calls: list[Any] = []
    for tenant in [OPEN] * 20 + [tenant_of("other", ("read",))] * 20:
        call = Call(GET_SEQUENCE, NO_IMAGE, 0, 0, b"", tenant)
        assert call.may_retry()
        call.retries_until -= SETTLE_AFTER_S
        calls.append(retries.run(call, Moves(settled)))
    assert await asyncio.gather(*calls) == ["done"] * 40
    assert sorted(settling) == ["default"] * 2 + ["other"] * 2, "one for each namespace's sequence"
