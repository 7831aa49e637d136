"""Random sequences in shuffled pages of a poisoned pool, the plans over them, and the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from kernels.backend import (
    NUMPY_DTYPES,
    AttentionState,
    Backend,
    DType,
    Level,
    Plan,
    PoolGeometry,
    Scoring,
    Unsupported,
)

Array = NDArray[Any]
FP8 = ("fp8_e4m3", "fp8_e5m2")
O_BAR = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}
LSE_BAR = 1e-3
ULP = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def int32(values: Any) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def indptr(lengths: Sequence[int]) -> NDArray[np.int32]:
    return int32(np.concatenate(([0], np.cumsum(lengths))))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Unit-normal values, and read-only, as a request's are."""
    values = rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])
    values.flags.writeable = False
    return values


def stored(values: Array, dtype: DType, scale: float) -> Array:
    """Values as a pool of `dtype` stores them, in float64: computed with ml_dtypes alone."""
    if dtype not in FP8:
        return values.astype(NUMPY_DTYPES[dtype]).astype(np.float64)
    largest = 448.0 if dtype == "fp8_e4m3" else 57344.0
    scaled = np.clip(values.astype(np.float32) / np.float32(scale), -largest, largest)
    return scaled.astype(NUMPY_DTYPES[dtype]).astype(np.float64) * scale


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pages with `k, v [num_keys, heads, dim]` in them, float64, as the pool holds them."""

    pages: NDArray[np.int32]
    k: Array
    v: Array

    @property
    def num_keys(self) -> int:
        return len(self.k)


@dataclass(slots=True)
class Pooled:
    """A backend, and pages of it handed out in shuffled order."""

    backend: Backend
    rng: np.random.Generator
    dtype: DType
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.rng.permutation(self.backend.geometry.num_pages).tolist()

    def slots(self, run: Run, layer: int = 0) -> NDArray[np.int32]:
        size = self.backend.geometry.group_of(layer).page_size
        return int32((run.pages[:, None] * size + np.arange(size)).reshape(-1)[: run.num_keys])

    def add(self, num_keys: int, layer: int = 0, bias: Array | None = None) -> Run:
        """Append `num_keys` random rows to fresh pages; `bias[t]` becomes dim 0 of key t."""
        group = self.backend.geometry.group_of(layer)
        pages = int32([self.free.pop() for _ in range(-(-num_keys // group.page_size))])
        shape = (num_keys, group.num_kv_heads)
        k, v = (normal(self.rng, (*shape, dim), self.dtype) for dim in group.stored_dims)
        if bias is not None:
            k = k.copy()
            k[:, :, 0] = bias[:, None]
        scales = self.backend.geometry.scales_of(group.dtype)
        held = [stored(x, group.dtype, s) for x, s in zip((k, v), scales, strict=True)]
        values = held[0][..., : group.v_head_dim] if group.kind == "latent" else held[1]
        run = Run(pages, held[0], values)
        self.backend.append(layer, k, v, self.slots(run, layer))
        return run

    def level(
        self,
        runs: Sequence[Run],
        qo_lens: Sequence[int],
        starts: Sequence[int],
        causal: bool,
        layer: int = 0,
    ) -> Level:
        """Segment s: `qo_lens[s]` rows over `runs[s]`, whose first key is at `starts[s]`."""
        size = self.backend.geometry.group_of(layer).page_size
        return Level(
            indptr(qo_lens),
            indptr([len(run.pages) for run in runs]),
            int32(np.concatenate([run.pages for run in runs])),
            int32([run.num_keys - max(0, len(run.pages) - 1) * size for run in runs]),
            int32(starts),
            causal,
        )

    def flat(
        self, runs: Sequence[Run], qo_lens: Sequence[int], causal: bool, layer: int = 0
    ) -> Plan:
        """Each run is one sequence's whole KV."""
        level = self.level(runs, qo_lens, [0] * len(runs), causal, layer)
        return Plan((level,), positions([run.num_keys for run in runs], qo_lens))


def positions(kv_lens: Sequence[int], qo_lens: Sequence[int]) -> NDArray[np.int32]:
    rows = [kv - qo + np.arange(qo) for kv, qo in zip(kv_lens, qo_lens, strict=True)]
    return int32(np.concatenate(rows))


def expected(
    q: Array,
    runs: Sequence[Run],
    qo_lens: Sequence[int],
    causal: bool,
    scoring: Scoring,
    masks: Sequence[Array] | None = None,
) -> oracle.State:
    """The oracle's o and lse for a flat batch."""
    states, begin = [], 0
    for b, (run, qo_len) in enumerate(zip(runs, qo_lens, strict=True)):
        seen = oracle.visible(
            qo_len,
            run.num_keys,
            causal=causal,
            window_left=scoring.window_left,
            mask=None if masks is None else masks[b],
        )
        rows = q[begin : begin + qo_len]
        begin += qo_len
        states.append(
            oracle.attend(
                rows,
                run.k,
                run.v,
                seen,
                sm_scale=scoring.sm_scale,
                logits_soft_cap=scoring.logits_soft_cap,
            )
        )
    return np.concatenate([o for o, _ in states]), np.concatenate([lse for _, lse in states])


def with_sinks(state: oracle.State, sinks: Array | None) -> oracle.State:
    o, lse = state
    if sinks is None:
        return state
    return oracle.merge([state, (np.zeros(o.shape), np.broadcast_to(sinks, lse.shape))])


@dataclass(frozen=True, slots=True)
class Bars:
    """Maximum errors of o and lse against the oracle with the operands `as_computed`."""

    o: float
    lse: float
    ulp: float


def compute_dtype(kind: str, q: DType, kv: DType) -> DType:
    """The format that a kind of backend multiplies in: float32 on the cpu, 16 bits on a device."""
    if kind == "cpu":
        return "fp32"
    return next((dtype for dtype in (kv, q) if dtype in ("fp16", "bf16")), "fp16")


def as_computed(kind: str, values: Array, q: DType, kv: DType) -> Array:
    """q, or ragged k or v, rounded as the contract says that a kind of backend rounds them."""
    return values.astype(NUMPY_DTYPES[compute_dtype(kind, q, kv)])


def bars(kind: str, q: DType, kv: DType) -> Bars:
    """The bar of q's dtype, or of the coarser one computed in, from which o is rounded again."""
    compute = compute_dtype(kind, q, kv)
    if kind == "cpu" or compute == q:
        return Bars(O_BAR[q], LSE_BAR, ULP[q])
    return Bars(max(O_BAR[q], O_BAR[compute]), LSE_BAR, ULP[q] + ULP[compute])


def check(got: AttentionState, want: oracle.State, bar: Bars, case: object = "") -> None:
    """Empty rows exactly (0, -inf); all others within the bar, plus the rounding of the result."""
    o, lse = want
    empty = np.isneginf(lse)
    assert got.o.shape == o.shape, f"{case}: o has shape {got.o.shape}, wants {o.shape}"
    assert got.lse.dtype == np.float32, f"{case}: lse is {got.lse.dtype}"
    real = got.o.astype(np.float64)
    assert np.isfinite(real).all(), f"{case}: o has {np.sum(~np.isfinite(real))} not finite"
    assert np.array_equal(np.isneginf(got.lse), empty), f"{case}: empty rows differ"
    assert not real[empty].any(), f"{case}: an empty row has o other than 0"
    off = np.abs(real - o) - bar.ulp * np.abs(o)
    assert off.max(initial=0) <= bar.o, f"{case}: o is off by {off.max()}, the bar is {bar.o}"
    off_lse = np.abs(got.lse[~empty] - lse[~empty]).max(initial=0)
    assert off_lse <= bar.lse, f"{case}: lse is off by {off_lse}, the bar is {bar.lse}"


@contextmanager
def refusals(kind: str, geometry: PoolGeometry) -> Iterator[None]:
    """Context of a case: features that a kind lists as unsupported must be rejected."""
    if kind == "cuda" and geometry.dtype == "fp32":
        with pytest.raises(Unsupported):
            yield
        return
    yield
