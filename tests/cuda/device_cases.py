"""Random pools, plans and a float64 oracle on the device, for the grids of the gpu tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.backend import NUMPY_DTYPES, Array, AttentionState, Int32, Level, Mask, Plan, Scoring
from kernels.cuda.backend import CudaBackend

TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BAR = {"fp16": 1e-3, "bf16": 1e-2}
"""Absolute error of o on unit-normal inputs."""
LSE_BAR = 1e-3


@dataclass(frozen=True)
class Segment:
    """Rows `first:stop` share `keys` keys that start at position `start`."""

    first: int
    stop: int
    keys: int
    start: int


@dataclass
class PagePool:
    """Hands out shuffled page ids of a backend."""

    backend: CudaBackend
    rng: np.random.Generator
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.rng.permutation(self.backend.geometry.num_pages).tolist()

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken


def pool_tensor(backend: CudaBackend) -> torch.Tensor:
    """The whole pool as `[layers, pages, 2, ...]` of its dtype, sharing its memory."""
    g = backend.geometry
    size = g.num_layers * g.num_pages * g.page_bytes
    memory = cupy.cuda.UnownedMemory(backend.kv.k, size, backend)
    raw = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    flat = torch.as_tensor(raw, device="cuda").view(TORCH[g.dtype])
    return flat.view(g.num_layers, *g.layer_shape)


def fill(backend: CudaBackend, seed: int) -> None:
    """Unit-normal real values everywhere."""
    pool = pool_tensor(backend)
    generator = torch.Generator("cuda").manual_seed(seed)
    k_scale, v_scale = scales(backend)
    for layer in pool:
        values = torch.randn(layer.shape, device="cuda", generator=generator)
        values[:, 0] /= k_scale
        values[:, 1] /= v_scale
        layer.copy_(values.to(layer.dtype))
    torch.cuda.synchronize()


def scales(backend: CudaBackend) -> tuple[float, float]:
    """What stored K and V times gives the real ones."""
    g = backend.geometry
    return (g.k_scale, g.v_scale) if g.dtype in ("fp8_e4m3", "fp8_e5m2") else (1.0, 1.0)


def poison(backend: CudaBackend, page: int, first: int) -> None:
    """NaN bytes into the slots of a page from `first` on, in every layer."""
    raw = pool_tensor(backend).view(torch.uint8)
    slots = raw[:, page]  # [layers, 2, ...]
    if backend.geometry.layout == "NHD":
        slots[:, :, first:] = 0xFF
    else:
        slots[:, :, :, first:] = 0xFF


def make_level(
    segments: Sequence[Segment], pool: PagePool, rows: int, causal: bool = False
) -> Level:
    """A level with fresh pages, dead slots poisoned; rows between segments see nothing."""
    size = pool.backend.geometry.page_size
    qo, kv, indices, last, start = [0], [0], [], [], []
    for s in segments:
        if s.first != qo[-1]:
            qo, kv, last, start = [*qo, s.first], [*kv, kv[-1]], [*last, 0], [*start, 0]
        pages = pool.take(-(-s.keys // size))
        indices += pages
        qo, kv = [*qo, s.stop], [*kv, kv[-1] + len(pages)]
        last.append((s.keys - 1) % size + 1 if s.keys else 0)
        start.append(s.start)
        if s.keys % size:
            poison(pool.backend, pages[-1], s.keys % size)
    if qo[-1] != rows:
        qo, kv, last, start = [*qo, rows], [*kv, kv[-1]], [*last, 0], [*start, 0]
    return Level(int32(qo), int32(kv), int32(indices), int32(last), int32(start), causal)


def int32(values: Any) -> Int32:
    return np.ascontiguousarray(values, dtype=np.int32)


def random_q(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Array:
    return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])  # type: ignore[index]


def on_device(q: Array) -> torch.Tensor:
    return torch.from_numpy(q.astype(np.float64)).cuda()


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 state of q [n, Hq, D] over k, v [m, Hkv, D]; visible [n, m]."""
    heads = k.shape[1]
    grouped = q.view(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    s = torch.einsum("nhgd,mhd->nhgm", grouped, k) * scoring.sm_scale
    if scoring.logits_soft_cap > 0:
        s = scoring.logits_soft_cap * torch.tanh(s / scoring.logits_soft_cap)
    s = s.masked_fill(~visible[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(s, -1) if s.shape[-1] else torch.full(s.shape[:-1], -torch.inf).to(s)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    o = torch.einsum("nhgm,mhd->nhgd", p, v)
    return o.reshape(q.shape), lse.reshape(q.shape[:2])


def merge_two(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(a[1], b[1])
    reference = torch.where(lse == -torch.inf, 0.0, lse)
    wa, wb = torch.exp(a[1] - reference), torch.exp(b[1] - reference)
    return a[0] * wa[..., None] + b[0] * wb[..., None], lse


def visible_keys(
    plan: Plan,
    rows: slice,
    start: int,
    keys: int,
    causal: bool,
    scoring: Scoring,
    mask: Mask | None,
) -> torch.Tensor:
    """[rows, keys] bool on the device, by the definitions of the contract."""
    own = plan.positions[rows].astype(np.int64)[:, None]
    position = start + np.arange(keys, dtype=np.int64)[None]
    seen: NDArray[np.bool_] = np.ones((len(own), keys), bool)
    if causal:
        seen &= position <= own
    if scoring.window_left >= 0:
        seen &= position >= own - scoring.window_left
    if mask is not None:
        bit = mask.row_offsets[rows][:, None] + position
        seen &= (mask.bits[bit >> 3] >> (bit & 7) & 1).astype(bool)
    return torch.from_numpy(seen).cuda()


def oracle(
    backend: CudaBackend,
    layer: int,
    q: Array,
    plan: Plan,
    scoring: Scoring,
    mask: Mask | None = None,
) -> tuple[Array, Array]:
    """Float64 (o, lse) of what `attend` computes, in q's row order."""
    g = backend.geometry
    k_scale, v_scale = scales(backend)
    pool = pool_tensor(backend)[layer]
    order = np.arange(len(q)) if plan.order is None else plan.order
    rows = on_device(q[order])
    o = torch.zeros_like(rows)
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device="cuda")
    for level in plan.levels:
        for s in range(len(level.kv_start)):
            mine = slice(int(level.qo_indptr[s]), int(level.qo_indptr[s + 1]))
            pages = level.kv_indices[level.kv_indptr[s] : level.kv_indptr[s + 1]]
            keys = (len(pages) - 1) * g.page_size + int(level.kv_last_page_len[s])
            if mine.start == mine.stop or len(pages) == 0:
                continue
            stored = pool[torch.from_numpy(pages.astype(np.int64)).cuda()].double()
            if g.layout == "HND":
                stored = stored.transpose(2, 3)
            k = stored[:, 0].reshape(-1, g.num_kv_heads, g.head_dim)[:keys] * k_scale
            v = stored[:, 1].reshape(-1, g.num_kv_heads, g.head_dim)[:keys] * v_scale
            start = int(level.kv_start[s])
            seen = visible_keys(plan, mine, start, keys, level.causal, scoring, mask)
            state = attend_dense(rows[mine], k, v, seen, scoring)
            o[mine], lse[mine] = merge_two((o[mine], lse[mine]), state)
    out_o, out_lse = np.empty(q.shape), np.empty(q.shape[:2])
    out_o[order], out_lse[order] = o.cpu().numpy(), lse.cpu().numpy()
    return out_o, out_lse


def assert_close(state: AttentionState, expected: tuple[Array, Array], dtype: str) -> None:
    """o and lse within the bar; rows that see nothing exactly (0, -inf)."""
    o, lse = state.o.astype(np.float64), state.lse.astype(np.float64)
    empty = expected[1] == -np.inf
    assert (lse[empty] == -np.inf).all() and (o[empty] == 0).all(), "empty rows are not (0, -inf)"
    assert np.isfinite(o).all(), f"{(~np.isfinite(o)).sum()} values of o are not finite"
    error = np.abs(o - expected[0])
    # one rounding of the result itself is not an error of the computation
    bar = BAR[dtype] + np.abs(expected[0]) * {"fp16": 2**-11, "bf16": 2**-8}[dtype]
    worst = np.unravel_index(np.argmax(error - bar), error.shape) if error.size else ()
    assert (error <= bar).all(), f"o is off by {error[worst]:.2e} at {worst}"
    off = np.abs(lse[~empty] - expected[1][~empty])
    assert (off <= LSE_BAR).all(), f"lse is off by {off.max():.2e}"
