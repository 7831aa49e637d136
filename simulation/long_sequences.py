"""Sequences longer than one pool: a decode step, and the prefill of all, over 1 to 64 engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import Final, Self

from bench.report.provenance import RESULTS
from simulation.gpu_costs import GpuCosts, Model

LENGTHS: Final = (128 * 2**10, 512 * 2**10, 2**20, 4 * 2**20, 10 * 2**20)
ENGINES: Final = (1, 2, 4, 8, 16, 32, 64)
PREFILL_CHUNK: Final = 8192
RANKS: Final = RESULTS / "ranks-h200.json"


@dataclass(frozen=True, slots=True)
class Links:
    """Latency one way and bytes a second of each engine's link, on one host and between hosts."""

    host_s: float
    engines_per_host: int = 8
    host_bytes_per_s: float = 200e9
    net_s: float = 30e-6
    net_bytes_per_s: float = 40e9

    @classmethod
    def measured(cls) -> Self:
        """Half of the time that a layer over two engines adds to half of it on one engine."""
        rows = json.loads(RANKS.read_text(encoding="utf-8"))["rows"]
        return cls(median(r["ranked"]["graph"] - r["one"]["graph"] for r in rows) / 2e6)

    def seconds(self, engines: int, num_bytes: float) -> float:
        """q to every engine and the states back, with `num_bytes` through one link."""
        far = engines > self.engines_per_host
        wait = self.net_s if far else self.host_s
        rate = self.net_bytes_per_s if far else self.host_bytes_per_s
        return 2 * wait + num_bytes / rate


@dataclass(frozen=True, slots=True)
class LongRow:
    """Milliseconds of attention for one token and seconds for the prompt, all layers.

    The prompt's states are merged on one engine, or in pieces of the rows on each.
    """

    tokens: int
    engines: int
    pool_share: float
    decode_ms: float
    prefill_s: float
    prefill_in_pieces_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """The costs, model, links and pools of all rows."""

    costs: GpuCosts
    model: Model
    links: Links
    pool_bytes: float

    def exchange_s(self, rows: int, engines: int, pieces: bool) -> float:
        """States of `rows` from every engine, brought together and merged."""
        if engines == 1:
            return 0.0
        num_bytes = float(rows * engines * self.model.state_bytes)
        share = num_bytes / engines if pieces else num_bytes
        return self.links.seconds(engines, share) + self.costs.merge.seconds(share)

    def decode_s(self, tokens: int, engines: int) -> float:
        """One token at one layer."""
        share = tokens / engines * self.model.layer_bytes
        kernel_s = self.costs.decode.seconds(share) + self.costs.hand_over_s
        return kernel_s + self.exchange_s(1, engines, False)

    def prefill_s(self, tokens: int, engines: int, pieces: bool) -> float:
        """A whole prompt at one layer, a chunk after the other."""
        whole_s = 0.0
        for start in range(0, tokens, PREFILL_CHUNK):
            rows = min(PREFILL_CHUNK, tokens - start)
            pairs = rows * (start + rows / 2) / engines
            whole_s += self.costs.prefill.seconds(pairs * self.model.pair_flops)
            whole_s += self.costs.append.seconds(rows / engines * self.model.layer_bytes)
            whole_s += self.exchange_s(rows, engines, pieces) + self.costs.hand_over_s
        return whole_s

    def row(self, tokens: int, engines: int) -> LongRow:
        """One sequence, its pages on all engines in turn."""
        layers = self.model.num_layers
        return LongRow(
            tokens,
            engines,
            round(tokens / engines * self.model.token_bytes / self.pool_bytes, 4),
            round(1e3 * layers * self.decode_s(tokens, engines), 3),
            round(layers * self.prefill_s(tokens, engines, False), 2),
            round(layers * self.prefill_s(tokens, engines, True), 2),
        )


def long_rows(setting: Setting) -> list[LongRow]:
    """Every length over every number of engines whose pools hold it."""
    every = [setting.row(tokens, engines) for tokens in LENGTHS for engines in ENGINES]
    return [row for row in every if row.pool_share <= 1.0]
