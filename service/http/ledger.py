"""What is told of answered requests, a little later: their log lines and their metrics.

A client that sends its next request at once would wait for both to be written, so they are kept
for a few milliseconds and told together.
"""

from __future__ import annotations

import asyncio
from typing import Final

from service.http.exchange import Exchange
from service.metrics import Metrics

DELAY_S: Final = 0.01
"""How long an answered request may stay untold."""


class Ledger:
    """Belongs to one event loop; `settle` tells all at once (before a scrape, at the end)."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._answered: list[tuple[Exchange, int, str]] = []

    def add(self, exchange: Exchange, status: int, code: str) -> None:
        """The request was answered just now; `code` is "ok" or an error's."""
        exchange.end()
        if not self._answered:
            asyncio.get_running_loop().call_later(DELAY_S, self.settle)
        self._answered.append((exchange, status, code))

    def settle(self) -> None:
        """Tell all that was answered."""
        answered, self._answered = self._answered, []
        for exchange, status, code in answered:
            exchange.tell(status, code, self._metrics)
