"""Long work of several requests has one piece in a pass of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from service.doors.kit.pieces import OneByOne
from service.doors.kit.upstream import trim


def test_requests_that_arrive_together_do_not_share_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    def work(pieces: int) -> Generator[None, None, int]:
        for _ in range(pieces):
            passes.append(number)
            yield
        return pieces

    async def main() -> None:
        nonlocal number
        turns = OneByOne()
        tasks = [asyncio.create_task(turns.do(work(3))) for _ in range(4)]
        while not all(task.done() for task in tasks):
            number += 1
            await asyncio.sleep(0)
        assert [task.result() for task in tasks] == [3] * 4

    asyncio.run(main())
    assert len(passes) == 12 and len(set(passes)) == 12


def test_a_door_returns_memory_one_piece_in_a_pass_of_the_loop() -> None:
    passes: list[int] = []
    number = 0

    class Unused:
        def trim(self, begin: int = 0) -> int | None:
            passes.append(number)
            return begin + 1 if begin < 4 else None

    async def main() -> None:
        nonlocal number
        upstream: Any = Unused()
        trim(asyncio.get_running_loop(), upstream)
        while number < 9:
            number += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(passes) == 5 and len(set(passes)) == 5
