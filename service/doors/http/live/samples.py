"""The service's counters, sampled once a second for the last five minutes."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from service.families import REASONS, SECONDS, STAGES
from service.image.json_text import dump_json
from service.metrics import Metrics
from service.operations.table import BY_NAME
from service.processes.cells import Key

PERIOD_S: Final = 1.0
KEPT: Final = 300
ATTENTION: Final = frozenset({"decode", "prefill", "ragged_prefill", "cascade", "step"})
COUNTED: Final = ("attention", "other", "failed")
"""Operations of the engine: attention, others, and errors."""
SUMS: Final = {
    "tokens_appended": "tokens",
    "kv_bytes_read": "read",
    "kv_bytes_saved": "saved",
    "pages_evicted": "evicted",
    "out_of_pages": "out_of_pages",
}
TIMES: Final = ("queue", *STAGES)
COLUMNS: Final = ("time", *COUNTED, *SUMS.values(), *REASONS, *TIMES, "turns")
"""Columns of a row: its time, in seconds since the epoch; rates per second; seconds that operations
spent in each stage, and turns, both per second."""
WATCHED: Final = frozenset(
    {"requests", *SUMS, "rejected", "queue_duration_seconds", "stage_duration_seconds"}
)
QUANTILES: Final = (0.5, 0.99)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The counters at one time, since the start; `spread` has each stage's histogram."""

    clock: float
    values: tuple[float, ...]
    spread: dict[str, Sequence[float]]


def sample_of(blocks: Mapping[Key, Sequence[float]]) -> Sample:
    """`values` are in the order of the columns after the time."""
    found = dict.fromkeys(COLUMNS[1:], 0.0)
    spread: dict[str, Sequence[float]] = {}
    for key, block in blocks.items():
        match key:
            case ("requests", op, code):
                if op in BY_NAME or op == "step":
                    kind = "attention" if op in ATTENTION else "other"
                    found[kind if code == "ok" else "failed"] += block[0]
            case ("rejected", reason):
                found[reason] = block[0]
            case ("queue_duration_seconds",):
                found["queue"], found["turns"] = block[-1], sum(block[:-1])
                spread["queue"] = block
            case ("stage_duration_seconds", stage):
                found[stage] = block[-1]
                spread[stage] = block
            case (name,):
                found[SUMS[name]] = block[0]
    return Sample(time.monotonic(), tuple(found.values()), spread)


class Samples:
    """The samples of one door. `newest` is the number of the last row; rows are JSON."""

    def __init__(self, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = metrics
        self._loop = loop
        self._samples: deque[Sample] = deque([self._sample()], maxlen=KEPT + 1)
        self._rows: deque[str] = deque(maxlen=KEPT)
        self.newest = 0
        loop.call_later(PERIOD_S, self._look)

    def _sample(self) -> Sample:
        return sample_of(self._metrics.totals(WATCHED))

    def _look(self) -> None:
        self._loop.call_later(PERIOD_S, self._look)
        before, now = self._samples[-1], self._sample()
        took = max(now.clock - before.clock, 1e-3)
        rates = ((b - a) / took for a, b in zip(before.values, now.values, strict=True))
        self._samples.append(now)
        self._rows.append(dump_json([round(time.time(), 1), *map(short, rates)]))
        self.newest += 1

    def after(self, number: int) -> tuple[int, list[str]]:
        """The rows after `number` that are kept; and the number of the first of them."""
        first = max(number, self.newest - len(self._rows))
        return first + 1, list(self._rows)[first - self.newest :] if first < self.newest else []

    def summary(self) -> dict[str, Any]:
        """Totals since the start, and each stage's latency over the rows: the number of operations,
        and milliseconds at the mean and the quantiles."""
        first, last = self._samples[0], self._samples[-1]
        latency = {}
        for stage in TIMES:
            if stage in last.spread:
                end = last.spread[stage]
                begin = first.spread.get(stage, [0.0] * len(end))
                latency[stage] = latency_of([b - a for a, b in zip(begin, end, strict=True)])
        return {
            "totals": dict(zip(COLUMNS[1:], last.values, strict=True)),
            "latency": latency,
            "seconds": round(last.clock - first.clock, 1),
        }


def latency_of(histogram: Sequence[float]) -> list[float]:
    """Count, mean and `QUANTILES` in milliseconds, from counts by bucket and the sum."""
    *counts, total = histogram
    number = sum(counts)
    if not number:
        return [0.0] * (2 + len(QUANTILES))
    mean = total / number
    return [number, *(short(1e3 * value) for value in (mean, *quantiles(counts, number)))]


def quantiles(counts: Iterable[float], number: float) -> list[float]:
    """`QUANTILES`, by linear interpolation in the bucket; in the last bucket, its lower end."""
    below = list(accumulate(counts))
    found = []
    for share in QUANTILES:
        at = min(bisect_left(below, share * number), len(SECONDS) - 1)
        low, before = (SECONDS[at - 1], below[at - 1]) if at else (0.0, 0.0)
        inside = (share * number - before) / max(below[at] - before, 1e-9)
        found.append(low + (SECONDS[at] - low) * min(inside, 1.0))
    return found


def short(value: float) -> float:
    """Seven significant digits, so that a sum over rows is right; whole numbers as integers."""
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() else rounded
