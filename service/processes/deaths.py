"""When a process that has died is restarted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

YOUNG_S: Final = 10.0
"""A process that ends sooner than this after its start failed during startup."""

EARLY_S: Final = 60.0
BACK_OFF_S: Final = 0.1
MAX_DOUBLINGS: Final = 7
"""Wait before a restart after a death earlier than `EARLY_S`. Each further one in a row doubles it,
up to `MAX_DOUBLINGS` times."""


@dataclass(slots=True)
class Deaths:
    """A process's latest deaths in a row: how many were `early`, and how many during startup."""

    early: int = 0
    young: int = 0

    def add(self, lived_s: float) -> float:
        """Count a death; the seconds to wait before the restart."""
        self.early = self.early + 1 if lived_s < EARLY_S else 0
        self.young = self.young + 1 if lived_s < YOUNG_S else 0
        return BACK_OFF_S * 2 ** min(self.early - 1, MAX_DOUBLINGS) if self.early else 0.0
