"""DevicePace: estimates how long work takes on the device, and learns from measurements."""

from __future__ import annotations

import math
from typing import Final

from service.engine.work.work import Cost

CORRECTION: Final = 0.3
"""Weight of the latest measurement in a rate, on a logarithmic scale."""
SHORT_SHARE: Final = 0.01
SHORT_S: Final = 5e-5
"""Work first estimated below `SHORT_S`, or this share of a slice, measures the overhead of calls
and launches, whatever the work."""
LONG_SHARE: Final = 0.1
"""Work first estimated above this share of a slice measures the device's rates, and so does work
that took a whole slice. Work in between measures both: it only shows that estimates were too
high."""
FAR_TOO_LONG: Final = 2.0
"""A slice this many times too long corrects the rate fully: others wait for each like it."""
MOST_CORRECTION: Final = 4.0
STEADY: Final = 1.25
FAR_OFF: Final = 2.0
MANY: Final = 32
"""Cuts follow a rate that moves only if the measured one is `FAR_OFF` times slower, or differs by
more than `STEADY` times `MANY` times running: measurements differ from call to call, and the same
call must be cut the same way."""
FURTHEST: Final = 1e6
"""Largest factor between a rate and its first guess, for measurements near 0."""
Factors = tuple[float, float]
"""Factors on the first guesses of the seconds for bytes and for flops."""
GUESSED: Final = (1.0, 1.0)
RATES: Final[dict[str, tuple[float, float]]] = {
    "cpu": (4e9, 2e10),
    "cuda": (2e12, 2e14),
    "none": (4e9, 2e10),
}
"""First guesses of bytes and flops per second by backend; measurements correct them."""


class DevicePace:
    """Estimates seconds from bytes and flops, at rates that measurements correct.

    A measurement corrects each of both rates by its part of the estimate, so decodes, which move
    bytes, say nothing about the flops of a prefill.
    """

    def __init__(self, bytes_per_s: float, flops_per_s: float, slice_s: float) -> None:
        self.slice_s = slice_s
        self._bytes_per_s = bytes_per_s
        self._flops_per_s = flops_per_s
        self._short_s = max(SHORT_SHARE * slice_s, SHORT_S)
        self._factors: dict[str, Factors] = {}
        self._steady: dict[str, Factors] = {}
        """Factors that cuts follow."""
        self._num_off: dict[str, int] = {}
        """Latest measurements running that disagree with them."""
        self._overheads: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        """The latest measurement of each kind, in seconds."""

    def seconds(self, kind: str, cost: Cost, is_steady: bool = False) -> float:
        """Estimated seconds of work of one kind ("attend", "append", ...); with `is_steady` at the
        rates that cuts follow."""
        factors = self._steady if is_steady else self._factors
        for_bytes, for_flops = factors.get(kind, GUESSED)
        moving_s = cost.num_bytes / self._bytes_per_s * for_bytes
        return moving_s + cost.flops / self._flops_per_s * for_flops

    def is_long(self, kind: str, cost: Cost) -> bool:
        """Whether work takes more than one slice."""
        return self.seconds(kind, cost, True) > self.slice_s

    def is_short(self, cost: Cost) -> bool:
        """Whether the overhead of calls and launches was first estimated to exceed the work."""
        return cost.num_bytes / self._bytes_per_s + cost.flops / self._flops_per_s < self._short_s

    def num_slices(self, kind: str, cost: Cost, fixed: Cost | None = None) -> int:
        """Number of slices for work of which every slice pays `fixed` again.

        At least half of a slice is work of its own, up to `FAR_TOO_LONG` slices of it.
        """
        again = 0.0 if fixed is None else self.seconds(kind, fixed, True)
        own = max(self.seconds(kind, cost, True) - again, 0.0)
        most = min(again, FAR_TOO_LONG * self.slice_s)
        return max(1, math.ceil(own / max(self.slice_s - again, self.slice_s / 2, most)))

    def start_from(self, kind: str, factor: float) -> None:
        """Multiplies the first guesses, before all work."""
        self._factors[kind] = self._steady[kind] = (factor, factor)

    def correct(self, kind: str, cost: Cost, measured_s: float) -> None:
        """Learn that work of a known cost took `measured_s`."""
        self.latest[kind] = measured_s
        bytes_s, flops_s = cost.num_bytes / self._bytes_per_s, cost.flops / self._flops_per_s
        for_bytes, for_flops = self._factors.get(kind, GUESSED)
        guess, overhead = bytes_s + flops_s, self._overheads.get(kind)
        estimate, is_short = bytes_s * for_bytes + flops_s * for_flops, guess < self._short_s
        if is_short:
            before = measured_s if overhead is None else overhead
            self._overheads[kind] = before + CORRECTION * (measured_s - before)
        is_long = guess >= LONG_SHARE * self.slice_s or measured_s >= self.slice_s
        if is_long and not is_short:
            ratio = (measured_s - (overhead or 0.0)) / estimate
        elif measured_s < estimate:  # too high, whatever part of it was overhead
            ratio = measured_s / estimate
        else:
            return
        ratio = min(max(ratio, 1 / MOST_CORRECTION), MOST_CORRECTION)
        ratio **= 1.0 if measured_s > FAR_TOO_LONG * self.slice_s else CORRECTION
        part = bytes_s * for_bytes / estimate
        whole = part**2 + (1 - part) ** 2  # the least changes that together give `ratio`
        self._factors[kind] = (
            within(for_bytes * ratio ** (part / whole)),
            within(for_flops * ratio ** ((1 - part) / whole)),
        )
        off = self.seconds(kind, cost) / self.seconds(kind, cost, True)
        self._num_off[kind] = 0 if 1 / STEADY <= off <= STEADY else self._num_off.get(kind, 0) + 1
        if off > FAR_OFF or self._num_off[kind] >= MANY:
            self._steady[kind], self._num_off[kind] = self._factors[kind], 0


def within(factor: float) -> float:
    """The nearest factor within `FURTHEST` of 1."""
    return min(max(factor, 1 / FURTHEST), FURTHEST)


def first_pace(backend: str, slice_s: float) -> DevicePace:
    return DevicePace(*RATES.get(backend, RATES["cpu"]), slice_s)
