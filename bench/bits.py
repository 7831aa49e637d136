"""Compares the bits of rows computed in many ways: the promise of `engine.numerics: invariant`.

    python -m bench.bits [--backend cuda] [--rows 1000000] [--seed 1]

Sequences grow in chunks of random size and are forked at random lengths. Random batches of them are
attended: any number of rows each, with and without cascade levels, cut into spans of rows, several
requests in a launch. A row's first result is remembered, whichever way it was computed; every later
one must have the same bits, and every sequence is computed again alone in a pool of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from kernels import make_backend
from kernels.backend import (
    NUMPY_DTYPES,
    Array,
    Attend,
    Backend,
    DType,
    PoolGeometry,
    RaggedAttend,
    Scoring,
)
from kernels.tensor import host_array
from service.core.plans.plan import CascadeMode
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.handlers.slices import RowSpan, cut_attend
from service.engine.store.plan_cache import PlanCache
from service.engine.work.work import Cost

Rng = np.random.Generator
MODES: Final[tuple[CascadeMode, ...]] = get_args(CascadeMode)


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same in a forest: its pool, its queries, its scoring."""

    geometry: PoolGeometry
    num_qo_heads: int
    scoring: Scoring
    most_tokens: int
    q_dtype: DType = "fp16"
    sinks: bool = False


@dataclass(slots=True, eq=False)
class Tokens:
    """A sequence's q, k and v for all positions that it may get; `owner` is who drew each one."""

    q: Array
    k: Array
    v: Array
    owner: NDArray[np.int64]
    length: int = 0


class Forest:
    """Sequences in one pool, and a checksum of the bits of every row computed so far."""

    def __init__(self, backend: Backend, shape: Shape, rng: Rng) -> None:
        self._backend, self._shape, self._rng = backend, shape, rng
        self._tokens: dict[str, Tokens] = {}
        self._pool()
        self._sums: dict[tuple[int, int], int] = {}
        heads, dim = shape.num_qo_heads, shape.geometry.head_dim
        self._sinks = rng.normal(1, 3, heads).astype(np.float32) if shape.sinks else None
        self._factors = rng.integers(0, 2**63, heads * (dim + 1), np.uint64) * np.uint64(2)
        self._factors += np.uint64(1)
        self.num_rows = 0
        self.different: list[str] = []
        """Rows whose bits were not the first ones, and how they were computed."""

    def _pool(self) -> None:
        geometry = self._shape.geometry
        self._tree = PrefixTree(geometry.num_pages, geometry.page_size, 1)
        self._plans = PlanCache(self._tree, self._backend.split_keys)

    def grow(self) -> None:
        """New sequences, forks of others, and chunks for some, each attended as it comes."""
        rng = self._rng
        for _ in range(int(rng.integers(1, 4))):
            self._new()
        for _ in range(int(rng.integers(2, 6))):
            names = self._some()
            most = int(rng.choice([1, 3, 40, 700]))
            room = [self._shape.most_tokens - self._tokens[name].length for name in names]
            counts = [int(rng.integers(0, 1 + min(most, left))) for left in room]
            self._append(names, counts)
            self._attend(names, counts, "chunks")

    def batch(self) -> None:
        """Some sequences' last rows: one each, a few, or any number."""
        names = self._some()
        most = int(self._rng.choice([1, 1, 5, 300]))
        self._attend(names, [min(most, self._tokens[n].length) for n in names], "batch")

    def alone(self) -> None:
        """Every sequence again, in pages of its own: all at once, and as keys of the call."""
        tokens, self._tokens = self._tokens, {}
        for name, one in tokens.items():
            self._pool()
            self._tree.create([NewSpec(name)])
            self._tokens = {name: replace(one, length=0)}
            self._append([name], [one.length])
            self._attend([name], [one.length], "alone")
            if self._shape.geometry.dtype == self._shape.q_dtype:
                self._ragged(one)

    def _new(self) -> None:
        """A sequence: empty, or the beginning of another."""
        rng, geometry, name = self._rng, self._shape.geometry, f"s{len(self._tokens)}"
        parent = (
            str(rng.choice(list(self._tokens))) if self._tokens and rng.random() < 0.8 else None
        )
        most, dim = self._shape.most_tokens, geometry.head_dim
        given = "fp16" if geometry.dtype.startswith("fp8") else geometry.dtype
        made = Tokens(
            self._normal((most, self._shape.num_qo_heads, dim), self._shape.q_dtype),
            self._normal((most, geometry.num_kv_heads, dim), given),
            self._normal((most, geometry.num_kv_heads, dim), given),
            np.full(most, len(self._tokens)),
        )
        if parent is not None:
            above = self._tokens[parent]
            made.length = int(rng.integers(0, above.length + 1))
            for mine in ("q", "k", "v", "owner"):
                getattr(made, mine)[: made.length] = getattr(above, mine)[: made.length]
        length = None if parent is None else made.length
        copies = self._tree.create([NewSpec(name, parent, length)])
        self._backend.copy_rows(copies.src_pages, copies.dst_pages, copies.num_rows)
        self._tokens[name] = made

    def _append(self, names: Sequence[str], counts: Sequence[int]) -> None:
        """The next tokens of sequences, one call."""
        some = [self._tokens[name] for name in names]
        ends = [slice(s.length, s.length + n) for s, n in zip(some, counts, strict=True)]
        k = np.concatenate([s.k[at] for s, at in zip(some, ends, strict=True)])
        v = np.concatenate([s.v[at] for s, at in zip(some, ends, strict=True)])
        extension = self._tree.extend(0, names, np.array(counts, np.int32))
        self._backend.append(0, k, v, extension.slots)
        for one, at in zip(some, ends, strict=True):
            one.length = at.stop

    def _attend(self, names: Sequence[str], counts: Sequence[int], how: str) -> None:
        """The last rows of sequences: as one request or two, whole or cut."""
        rng, half = self._rng, len(names) // 2
        parts = [slice(0, half), slice(half, None)] if rng.random() < 0.3 else [slice(None)]
        attends, owners = [], []
        for part in parts:
            mode = MODES[int(rng.integers(len(MODES)))]
            planned = self._plans.sequences(names[part], 0, _indptr(counts[part]), True, mode)
            rows = [self._rows(n, c) for n, c in zip(names[part], counts[part], strict=True)]
            owner = [row for _, keys in rows for row in keys]
            q = np.concatenate([q for q, _ in rows] or [self._normal((0, 1, 1), "fp16")])
            whole = Attend(0, q, planned.plan, self._shape.scoring, sinks=self._sinks)
            if len(parts) == 1 and rng.random() < 0.3 and len(q):
                self._cut(whole, owner, f"{how}, {mode}, cut")
            elif len(q):
                attends.append(whole)
                owners.append((owner, f"{how}, {mode}"))
        if attends:
            states = self._backend.attend(attends).result()
            for state, (owner, text) in zip(states, owners, strict=True):
                self._compare(state, owner, text)

    def _cut(self, whole: Attend, owner: list[tuple[int, int]], how: str) -> None:
        """The spans of rows that slices of long work are."""
        num_rows = len(owner)
        cuts = np.unique([0, *self._rng.integers(0, num_rows + 1, 3), num_rows]).tolist()
        for first, last in pairwise(cuts):
            piece, rows = cut_attend(whole, RowSpan(first, last, Cost()))
            mine = np.arange(num_rows)[rows]
            state = self._backend.attend([piece]).result()[0]
            self._compare(state, [owner[i] for i in mine], how)

    def _ragged(self, one: Tokens) -> None:
        """All rows of a sequence over keys that come with the call."""
        at = np.array([0, one.length], np.int32)
        rows = (one.q[: one.length], one.k[: one.length], one.v[: one.length])
        if one.length:
            call = RaggedAttend(*rows, at, at, True, self._shape.scoring, sinks=self._sinks)
            state = self._backend.attend_ragged(call).result()
            self._compare(
                state, [(int(n), p) for p, n in enumerate(one.owner[: one.length])], "ragged"
            )

    def _compare(self, state: Any, owner: Sequence[tuple[int, int]], how: str) -> None:
        o, lse = host_array(state.o), host_array(state.lse)
        bits = o.view(f"u{o.dtype.itemsize}").reshape(len(o), -1)
        bits = np.concatenate((bits, lse.view(np.uint32)), axis=1).astype(np.uint64)
        sums = (bits * self._factors).sum(axis=1, dtype=np.uint64).tolist()
        self.num_rows += len(sums)
        for row, found in zip(owner, sums, strict=True):
            if self._sums.setdefault(row, found) != found:
                self.different.append(f"row {row[1]} of s{row[0]}: {how}")

    def _rows(self, name: str, count: int) -> tuple[Array, list[tuple[int, int]]]:
        """The last rows of a sequence, and who owns each position."""
        one = self._tokens[name]
        first = one.length - count
        owner = one.owner[first : one.length].tolist()
        return one.q[first : one.length], list(zip(owner, range(first, one.length), strict=True))

    def _some(self) -> list[str]:
        names = self._rng.permutation(list(self._tokens))
        return list(map(str, names[: self._rng.integers(1, len(names) + 1)]))

    def _normal(self, size: tuple[int, ...], dtype: DType) -> Array:
        return self._rng.standard_normal(size, np.float32).astype(NUMPY_DTYPES[dtype])


def _indptr(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def run(backend: Backend, shape: Shape, rng: Rng, num_rows: int) -> tuple[int, list[str]]:
    """Rows compared, at least `num_rows` unless the pool is full, and the number that differ."""
    forest = Forest(backend, shape, rng)
    most = shape.geometry.num_pages * shape.geometry.page_size // shape.most_tokens - 4
    for _ in range(10**6):
        if len(forest._tokens) < most:
            forest.grow()
        forest.batch()
        if forest.num_rows >= num_rows:
            break
    forest.alone()
    return forest.num_rows, forest.different


def shapes(most_tokens: int, num_pages: int, kv_heads: int, fp32: bool) -> list[Shape]:
    """Pools of each dtype, several head_dims, groups and page sizes; windows and caps."""
    rows: list[tuple[DType, int, int, int, Scoring]] = [
        ("fp16", 16, 128, 4, Scoring(0.09)),
        ("bf16", 32, 64, 8, Scoring(0.12, 0.0, 300)),
        ("fp8_e4m3", 16, 128, 4, Scoring(0.09)),
        ("fp16", 8, 64, 1, Scoring(0.12, 30.0)),
        ("fp16", 5, 128, 7, Scoring(0.09)),
    ]
    if fp32:
        rows.append(("fp32", 16, 64, 4, Scoring(0.12, 0.0, 50)))
    made = []
    for dtype, page_size, dim, group, scoring in rows:
        pages = num_pages * 16 // page_size
        scale = 0.5 if dtype.startswith("fp8") else 1.0
        geometry = PoolGeometry(1, pages, page_size, kv_heads, dim, "NHD", dtype, scale, scale)
        q_dtype: DType = "fp16" if dtype.startswith("fp8") else dtype
        sinks = (dtype, page_size) in (("bf16", 32), ("fp8_e4m3", 16))
        made.append(Shape(geometry, kv_heads * group, scoring, most_tokens, q_dtype, sinks))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    is_cpu = args.backend == "cpu"
    every = shapes(*((900, 2000, 2, True) if is_cpu else (6000, 12000, 2, False)))
    total = bad = 0
    for number, shape in enumerate(every):
        start, rng = time.perf_counter(), np.random.default_rng([args.seed, number])
        backend = make_backend(args.backend, shape.geometry, poison=True, numerics="invariant")
        rows, different = run(backend, shape, rng, args.rows // len(every))
        backend.close()
        total, bad = total + rows, bad + len(different)
        g = shape.geometry
        name = f"{g.dtype} page {g.page_size} dim {g.head_dim} heads {shape.num_qo_heads}"
        print(f"{name}: {rows} rows, {len(different)} differ, {time.perf_counter() - start:.1f} s")
        print(*different[:10], sep="\n", end="\n" if different else "")
    print(f"{total} rows, {bad} differ")
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
