"""Time of work on one GPU engine, from the measured tables of kernels and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Self

import numpy as np

from bench.report.kernel_results import KERNEL_RESULTS
from bench.report.provenance import RESULTS, read_results

ROAD: Final = RESULTS / "road-h200.json"
FP8_ROW: Final = "decode/64x4k-fp8"
PLACE: Final = "other_gpu"
"""The caller's model on one GPU, the engine on another."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as `fixed_s + amount / per_s`."""

    fixed_s: float
    per_s: float

    def seconds(self, amount: float) -> float:
        return self.fixed_s + amount / self.per_s

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """The line of least relative error through (amount, seconds), without a negative part."""
        x, y = np.array(points).T
        ones = np.stack((1 / y, x / y), axis=1)
        scale = ones.max(axis=0)
        fixed, slope = np.linalg.lstsq(ones / scale, np.ones_like(y), rcond=None)[0] / scale
        if fixed < 0:
            fixed, slope = 0.0, 1 / np.average(x / y)
        return cls(float(fixed), float(1 / slope))


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """A layer's attention on one engine.

    Decode by bytes of KV, prefill by flops, append by bytes; and the seconds that a layer's
    hand-over between caller and engine adds.
    """

    decode: Line
    prefill: Line
    append: Line
    hand_over_s: float

    @classmethod
    def measured(cls) -> Self:
        """Of fp8 pools, from bench/results/h200.json and road-h200.json."""
        rows = {row["name"]: row for row in read_results(KERNEL_RESULTS)["rows"]}
        road = read_results(ROAD)["rows"]
        fp16 = Line.through(points(rows, "decode/", "tbps", but=("fp8", "page1")))
        ((amount, seconds),) = points(rows, FP8_ROW, "tbps")
        there = [row for row in road if row["place"] == PLACE]
        over = [row["graph"]["layer_us"] - row["kernels_us"] for row in there]
        return cls(
            Line(fp16.fixed_s, amount / (seconds - fp16.fixed_s)),
            Line.through(points(rows, "prefill/", "tflops", but=("ragged",))),
            half_fixed(*points(rows, "append/", "tbps")[0]),
            median(over) / 1e6,
        )


def half_fixed(amount: float, seconds: float) -> Line:
    """A line by the one point that was measured: half of its time is taken as fixed."""
    return Line(seconds / 2, amount / (seconds / 2))


def points(
    rows: Mapping[str, Any], prefix: str, rate: str, but: Sequence[str] = ()
) -> list[tuple[float, float]]:
    """Amount and seconds of the workloads of one kind."""
    return [
        (row[rate] * row["ms"] * 1e9, row["ms"] / 1e3)
        for name, row in rows.items()
        if name.startswith(prefix) and not any(word in name for word in but)
    ]


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of attention: layers, heads, and bytes of one stored value."""

    num_layers: int = 32
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_bytes: int = 1

    @property
    def layer_bytes(self) -> int:
        """K and V of a token at one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def token_bytes(self) -> int:
        return self.layer_bytes * self.num_layers

    @property
    def pair_flops(self) -> int:
        """Of one query and one key at one layer, all heads."""
        return 4 * self.num_qo_heads * self.head_dim
