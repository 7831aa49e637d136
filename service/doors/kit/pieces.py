"""Long work on an event loop in pieces, with a pass of the loop after each piece."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from service.image.json_pieces import Pieces

T = TypeVar("T")


class OneByOne:
    """Runs one piece of long work per pass of the loop, over all requests."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def do(self, pieces: Pieces[T]) -> T:
        """The result of the work. Work of a single piece runs at once if no other work is under
        way. Otherwise even its first piece waits: requests that arrive together must not share a
        pass of the loop."""
        async with self._turn:
            while True:
                try:
                    next(pieces)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                await asyncio.sleep(0)
