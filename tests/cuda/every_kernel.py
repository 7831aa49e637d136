"""Every CUDA kernel on small inputs, against the oracle: what compute-sanitizer is given to run.

    compute-sanitizer --tool memcheck python tests/cuda/every_kernel.py

Each pool's geometry picks other specialisations: few and many rows, 16-bit and fp8 storage, masks
and soft caps, whole pages by TMA and odd ones without, rows in K's and V's own registers or turns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/kernels")]

import oracle  # noqa: E402
from pooled import (  # noqa: E402
    Array,
    Pooled,
    Run,
    as_computed,
    bars,
    check,
    expected,
    indptr,
    int32,
    normal,
    positions,
    stored,
    with_sinks,
)

from kernels import BackendKind, make_backend  # noqa: E402
from kernels.backend import (  # noqa: E402
    LEFT_OUT,
    NUMPY_DTYPES,
    Attend,
    AttentionState,
    Backend,
    DType,
    LayerGroup,
    Layout,
    Mask,
    Numerics,
    PagePlaces,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
)
from kernels.compile import SOURCES  # noqa: E402
from kernels.digests import host_digests  # noqa: E402
from kernels.masks import make_mask  # noqa: E402

QO_HEADS, KV_HEADS = 4, 1
LENGTHS = [70, 0, 33, 16]
Pools = list[tuple[int, DType, DType, Layout, int]]
POOLS: Pools = [
    (128, "fp16", "fp16", "NHD", 16),
    (64, "bf16", "bf16", "HND", 8),
    (80, "fp8_e4m3", "fp16", "NHD", 5),
    (64, "fp8_e5m2", "bf16", "HND", 5),
    (256, "fp16", "fp16", "HND", 1),
    (128, "fp16", "fp16", "NHD", 5),
]
"""head_dim, dtype of the pool, of q, layout, page_size."""
SHAPES = (
    LayerGroup((0, 1), KV_HEADS, 576, 512, 16, "bf16", None, "latent"),
    LayerGroup((0, 1), KV_HEADS, 576, 512, 5, "fp16", None, "latent"),
    LayerGroup((0, 1), KV_HEADS, 192, 128, 16, "fp16"),
    LayerGroup((0, 1), KV_HEADS, 72, 40, 5, "bf16"),
)
"""Rows of K and of V of two sizes, and latent rows."""
INVARIANT: Pools = [POOLS[0], (128, "fp8_e4m3", "fp16", "NHD", 16), POOLS[3], POOLS[5]]


class Small:
    """One pool, and small attention over it of every kind."""

    def __init__(self, backend: Backend, dtype: DType, rng: np.random.Generator) -> None:
        self.kind, self.backend, self.dtype, self.rng = backend.name, backend, dtype, rng
        self.pooled = Pooled(backend, rng, dtype)
        self.geometry = backend.geometry

    def query(self, rows: int) -> Array:
        return normal(self.rng, (rows, QO_HEADS, self.geometry.head_dim), self.dtype)

    def equals(self, got: AttentionState, want: oracle.State, case: object) -> None:
        check(got, want, bars(self.kind, self.dtype, self.geometry.dtype), (self.geometry, case))

    def computed(self, q: Array) -> Array:
        return as_computed(self.kind, q, self.dtype, self.geometry.dtype)

    def attend(self, runs: list[Run], qo_len: int, scoring: Scoring, masked: bool) -> None:
        """`qo_len` causal rows on every run that has keys, one on the others."""
        qo_lens = [qo_len if run.num_keys >= qo_len else 1 for run in runs]
        kv_lens = [run.num_keys for run in runs]
        q, masks, mask = self.query(sum(qo_lens)), None, None
        if masked:
            masks, mask = self.masks(qo_lens, kv_lens)
        plan = self.pooled.flat(runs, qo_lens, causal=True)
        sinks = None if masked else normal(self.rng, (QO_HEADS,), "fp32")
        (state,) = self.backend.attend([Attend(1, q, plan, scoring, mask, sinks=sinks)]).result()
        want = expected(self.computed(q), runs, qo_lens, True, scoring, masks)
        self.equals(state, with_sinks(want, sinks), (qo_len, scoring, masked))

    def masks(self, qo_lens: list[int], kv_lens: list[int]) -> tuple[list[Array], Mask]:
        pairs = zip(qo_lens, kv_lens, strict=True)
        masks = [self.rng.random(qo * kv) < 0.7 for qo, kv in pairs]
        return masks, make_mask(np.concatenate(masks), int32(qo_lens), int32(kv_lens))

    def share(self, scoring: Scoring) -> None:
        """Two levels: 12 sequences on one run, each with a run of its own."""
        size, batch = self.geometry.page_size, 12
        shared = self.pooled.add(size * -(-64 // size), 1)
        own = [self.pooled.add(5 + 3 * i, 1) for i in range(batch)]
        levels = (
            self.pooled.level([shared], [batch], [0], False),
            self.pooled.level(own, [1] * batch, [shared.num_keys] * batch, False),
        )
        whole = [
            Run(int32([]), np.concatenate([shared.k, run.k]), np.concatenate([shared.v, run.v]))
            for run in own
        ]
        ones = [1] * batch
        plan = Plan(levels, positions([run.num_keys for run in whole], ones))
        q, sinks = self.query(batch), normal(self.rng, (QO_HEADS,), "fp32")
        (state,) = self.backend.attend([Attend(1, q, plan, scoring, sinks=sinks)]).result()
        want = expected(self.computed(q), whole, ones, False, scoring)
        self.equals(state, with_sinks(want, sinks), "cascade")

    def ragged(self, qo_len: int, scoring: Scoring, masked: bool) -> None:
        shape, dims = (sum(LENGTHS), KV_HEADS), self.geometry.groups[0].stored_dims
        k, v = (normal(self.rng, (*shape, dim), self.dtype) for dim in dims)
        qo_lens = [qo_len] * len(LENGTHS)
        q, masks, mask = self.query(sum(qo_lens)), None, None
        if masked:
            masks, mask = self.masks(qo_lens, LENGTHS)
        bounds = indptr(LENGTHS)
        request = RaggedAttend(q, k, v, indptr(qo_lens), bounds, True, scoring, mask)
        state = self.backend.attend_ragged(request).result()
        runs = [
            Run(int32([]), k[a:b].astype(float), v[a:b].astype(float)) for a, b in pairwise(bounds)
        ]
        want = expected(q, runs, qo_lens, True, scoring, masks)
        self.equals(state, want, ("ragged", qo_len, scoring, masked))

    def step(self, qo_heads: int) -> None:
        """A decode that stores its sequences' new tokens in the kernel that reads them."""
        import cupy

        from kernels.cuda.attention import device_plan as planning
        from kernels.cuda.attention.config import AttentionConfig

        g, dtype, scoring = self.geometry, self.dtype, Scoring(self.geometry.head_dim**-0.5)
        backend: Any = self.backend
        runs = [self.pooled.add(n, 1) for n in (70, 1, 16, 300)]
        ones = [1] * len(runs)
        plan = self.pooled.flat(runs, ones, causal=True)
        config = AttentionConfig(backend.kv, qo_heads, dtype, scoring, False)
        kind = "short decode" if qo_heads <= 8 and g.head_dim == 128 else "usual"
        kinds = lambda *given: kind if kind in given[-1] else "usual"  # noqa: E731
        with patch.object(planning, "batch_kind", kinds):
            device_plan = backend.attention.make([(1, plan)], config)
        if not device_plan.appends:
            if qo_heads <= 8 and g.dtype == dtype and g.head_dim >= 128 and not backend.split_keys:
                raise AssertionError(f"{g}: the narrow kernel stores no new tokens")
            return
        q = normal(self.rng, (len(runs), qo_heads, g.head_dim), dtype)
        new = [normal(self.rng, (len(runs), KV_HEADS, g.head_dim), dtype) for _ in "kv"]
        for i, run in enumerate(runs):
            run.k[-1], run.v[-1] = (stored(rows[i], g.dtype, 1.0) for rows in new)
        on_device = [cupy.asarray(rows.view(np.uint8)) for rows in (q, *new, q)]
        lse = cupy.empty(q.shape[:2], np.float32)
        at, k, v, o = (rows.data.ptr for rows in on_device)
        backend.transfers.finish()
        with backend.transfers.compute:
            where = (at, o, lse.data.ptr)
            backend.attention.enqueue(device_plan, config, 1, where, new=(k, v))
        backend.transfers.finish()
        got = AttentionState(on_device[-1].get().view(q.dtype), lse.get())
        self.equals(got, expected(q, runs, ones, True, scoring), ("step", qo_heads))

    def move(self) -> None:
        """Rows in, copied to another page, and out again."""
        run = self.pooled.add(self.geometry.page_size, 1)
        copy = Run(int32([self.pooled.free.pop()]), run.k, run.v)
        self.backend.copy_rows(run.pages, copy.pages, int32([run.num_keys]))
        k, v = self.backend.gather(1, self.pooled.slots(copy), "fp32").result()
        for got, want in ((k, run.k), (v, run.v)):
            if not np.allclose(got, want, rtol=1e-6):
                raise AssertionError(f"{self.geometry}: gathered rows differ from those copied")
        self.move_stored(run, copy)
        self.move_pages(run, copy)
        self.append_some(copy)

    def append_some(self, run: Run) -> None:
        """New rows over a run's, but for every other one."""
        g, slots = self.geometry, self.pooled.slots(run)
        shape = (run.num_keys, KV_HEADS, g.head_dim)
        k, v = (normal(self.rng, shape, self.dtype) for _ in range(2))
        slots[::2] = LEFT_OUT
        self.backend.append(1, k, v, slots)
        rows = self.backend.gather(1, self.pooled.slots(run), "fp32").result()
        scales = g.k_scale, g.v_scale
        is_new = (slots != LEFT_OUT)[:, None, None]
        for got, new, old, scale in zip(rows, (k, v), (run.k, run.v), scales, strict=True):
            if not np.allclose(got, np.where(is_new, stored(new, g.dtype, scale), old), rtol=1e-6):
                raise AssertionError(f"{g}: a row was written that is left out, or another lost")

    def move_stored(self, run: Run, copy: Run) -> None:
        """Rows out and in as they are stored."""
        shape = (run.num_keys, KV_HEADS, self.geometry.head_dim)
        kind = NUMPY_DTYPES[self.geometry.dtype]
        read = [(np.zeros(shape, kind), np.zeros(shape, kind)) for _ in range(2)]
        self.backend.read_stored(1, self.pooled.slots(run), read[0]).result()
        self.backend.write_stored(0, *read[0], self.pooled.slots(copy)).result()
        self.backend.read_stored(0, self.pooled.slots(copy), read[1]).result()
        for got, want in zip(*read, strict=True):
            if not np.array_equal(got.view(np.uint8), want.view(np.uint8)):
                raise AssertionError(f"{self.geometry}: stored rows changed on their way")

    def move_pages(self, run: Run, copy: Run) -> None:
        """A page to host memory, and to another page."""
        g, copies = self.geometry, self.backend.page_copies
        memory = copies.memory(2, g.num_layers * g.page_bytes)
        first, second = (PagePlaces(memory, np.array([row])) for row in range(2))
        digests = copies.read(run.pages, first, copies.mark())()
        every = [digests, copies.write(copy.pages, first, copies.mark())()]
        every.append(copies.read(copy.pages, second, copies.mark())())
        if not np.array_equal(*memory):
            raise AssertionError(f"{g}: a page changed on its way")
        if any(one != host_digests(first, g) for one in every):
            raise AssertionError(f"{g}: the digest of a page is wrong")

    def merge(self, lists: int, members: int, head_dim: int, into: bool) -> None:
        shape = (lists * members, QO_HEADS, head_dim)
        o, lse = normal(self.rng, shape, self.dtype), normal(self.rng, shape[:2], "fp32")
        bounds = int32(np.arange(lists + 1) * members)
        parts = [(o[i::members], lse[i::members]) for i in range(members)]
        target, got_shape = None, (lists, *shape[1:])
        if into:
            first = normal(self.rng, got_shape, self.dtype)
            first_lse = normal(self.rng, (lists, QO_HEADS), "fp32")
            parts.append((first, first_lse))
            target = AttentionState(first.copy(), first_lse.copy())
        sinks = normal(self.rng, (QO_HEADS,), "fp32")
        parts.append((np.zeros(got_shape), np.broadcast_to(sinks, got_shape[:2])))
        got = self.backend.merge(o, lse, bounds, target, sinks=sinks).result()
        self.equals(got, oracle.merge(parts), ("merge", shape, into))

    def attention(self) -> None:
        """Of few and of many rows, by every scoring, cut and shared."""
        scale, ragged = self.geometry.head_dim**-0.5, 0 not in self.geometry.groups[0].stored_dims
        runs = [self.pooled.add(n, 1) for n in LENGTHS]
        scorings = (Scoring(scale), Scoring(scale, 20.0), Scoring(scale, window_left=9))
        for qo_len in (1, 4, 33):  # 4, 16 and 132 packed rows
            for scoring in scorings:
                self.attend(runs, qo_len, scoring, False)
            self.attend(runs, qo_len, Scoring(scale), True)
            if ragged:
                self.ragged(qo_len, Scoring(scale), False)
                self.ragged(qo_len, Scoring(scale, 20.0), True)
        self.attend([runs[0], runs[2]], 33, Scoring(scale), False)  # short prefills and no others
        long = self.pooled.add(2500, 1)  # cut, and merged; or the states of its splits joined
        for qo_len in (1, 33):
            self.attend([long], qo_len, Scoring(scale), False)
        self.share(Scoring(scale))

    def copies(self) -> None:
        """A page's rows in another page, in a pool of rows of two sizes."""
        run = self.pooled.add(self.geometry.page_size, 1)
        copy = Run(int32([self.pooled.free.pop()]), run.k, run.v)
        self.backend.copy_rows(run.pages, copy.pages, int32([run.num_keys]))
        got = self.backend.gather(1, self.pooled.slots(copy, 1), "fp32").result()
        for rows, want in zip(got, (run.k, run.v), strict=True):
            if rows.size and not np.array_equal(rows, want):
                raise AssertionError(f"{self.geometry}: gathered rows differ from those copied")

    def all(self) -> None:
        self.attention()
        if self.kind == "cuda":
            for qo_heads in (2, 4, 8, 16):  # every way in which lanes share the columns
                self.step(qo_heads)
        self.move()
        for members, head_dim in ((2, self.geometry.head_dim), (5, 24)):
            self.merge(7, members, head_dim, into=members == 2)


def run(kind: BackendKind, pools: Pools = POOLS, numerics: Numerics = "fast") -> set[str]:
    """Everything on a kind of backend; the entry points that a device launched."""
    launched: set[str] = set()
    for head_dim, dtype, q_dtype, layout, page_size in pools:
        pages = 6000 // page_size + 64
        geometry = PoolGeometry(2, pages, page_size, KV_HEADS, head_dim, layout, dtype, 0.5, 2.0)
        with small(kind, geometry, q_dtype, numerics, launched) as one:
            one.all()
    return launched


def run_shapes(
    kind: BackendKind, shapes: Sequence[LayerGroup] = SHAPES, numerics: Numerics = "fast"
) -> set[str]:
    """The same on pools of rows of K and of V of two sizes, and of latent rows."""
    launched: set[str] = set()
    for group in shapes:
        geometry = PoolGeometry.of_groups((group,), 6000 // group.page_size + 64)
        with small(kind, geometry, group.dtype, numerics, launched) as one:
            one.attention()
            one.copies()
    return launched


@contextmanager
def small(
    kind: BackendKind, geometry: PoolGeometry, dtype: DType, numerics: Numerics, launched: set[str]
) -> Iterator[Small]:
    """A pool; adds the entry points that it launches to `launched`."""
    backend = make_backend(kind, geometry, poison=True, numerics=numerics)
    library = getattr(backend, "library", None)
    if library is not None:
        find = library.function
        library.function = lambda spec, entry, *size: (
            launched.add(entry),
            find(spec, entry, *size),
        )[1]
    yield Small(backend, dtype, np.random.default_rng(11))
    backend.close()
    print(f"{kind}, {numerics}: right on {geometry}", flush=True)


def entries() -> set[str]:
    """Every entry point of the sources."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.cu"))
    return set(re.findall(r'extern "C" __global__ .*?\s(\w+)\(const ', text, re.DOTALL))


if __name__ == "__main__":
    shapes, skipped = SHAPES, set()
    if "--without-latent" in sys.argv:
        shapes, skipped = SHAPES[2:], {"attend_latent"}
    missing = entries() - skipped - run("cuda") - run("cuda", INVARIANT, "invariant")
    missing -= run_shapes("cuda", shapes) | run_shapes("cuda", shapes[::2], "invariant")
    if missing:
        raise SystemExit(f"never launched: {', '.join(sorted(missing))}")
