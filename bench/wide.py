"""The wide kernel alone on a device: states against float64, and TFLOP/s of its real sizes.

`python -m bench.wide check GROUP` prints one line per case and exits 1 if one is wrong
(`check-pairs`: with blocks in clusters of two);
`python -m bench.wide time [VARIANT ...] [-- CASE ...]` prints milliseconds and TFLOP/s.
Work items come from the backend's planner with the wide tile as its only shape; partial states are
merged here, in torch, so that nothing but the kernel under test is CuPy's.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kernels.backend import Level, Plan, PoolGeometry
from kernels.compile import Spec, compile_spec
from kernels.cuda import wide
from kernels.cuda.planner import Problem, TileShape, Work, make_work

SMS: Final = 132


@dataclass(frozen=True, slots=True)
class Case:
    """One batch. `levels`: nodes as (kv_len, first row, rows past the last); None: one per row set.

    `qo_lens[b]` queries of a sequence whose own keys number `kv_lens[b]`, positions aligned at the
    end; with `shared` > 0 a first level of that many keys is shared by every row, in front.
    """

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shared: int = 0
    own_level: bool = True
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    layout: str = "NHD"
    dtype: str = "fp16"
    causal: bool = True
    window: int = -1
    soft_cap: float = 0.0
    mask: bool = False
    ragged: bool = False
    workers: int = SMS
    tile_rows: int = 128
    granule: int = 128
    shuffled_rows: bool = False
    bucketed: bool = False  # items of about the same cost stay in row order, next to their keys
    head_block: int = 1

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        return sum(self.qo_lens)

    @property
    def flops(self) -> int:
        """Multiply-adds times two over visible pairs only, as attention is usually counted."""
        pairs = self.rows * self.shared
        if self.own_level:
            for qo, kv in zip(self.qo_lens, self.kv_lens, strict=True):
                pairs += sum(max(0, kv - qo + i + 1) for i in range(qo)) if self.causal else qo * kv
        return 4 * self.num_qo_heads * self.head_dim * pairs


def positions(case: Case) -> Any:
    return np.concatenate(
        [
            case.shared + kv - qo + np.arange(qo)
            for qo, kv in zip(case.qo_lens, case.kv_lens, strict=True)
        ]
    ).astype(np.int32)


def make_plan(case: Case, rng: np.random.Generator) -> tuple[Plan, int]:
    """The plan and how many pages it uses; page ids are shuffled, or rows where keys are ragged."""
    size = 1 if case.ragged else case.page_size
    runs = [case.shared] if case.shared else []
    runs += list(case.kv_lens) if case.own_level else []
    pages = [-(-run // size) for run in runs]
    total = sum(pages)
    ids = np.arange(total) if case.ragged else rng.permutation(total)
    ids = ids.astype(np.int32)
    levels, used = [], 0
    if case.shared:
        levels.append(
            _level([0, case.rows], [pages[0]], [case.shared], size, ids[: pages[0]], [0], False)
        )
        used = pages[0]
    if case.own_level:
        qo = np.concatenate([[0], np.cumsum(case.qo_lens)])
        own = pages[1 if case.shared else 0 :]
        start = [case.shared] * len(case.kv_lens)
        levels.append(_level(qo, own, list(case.kv_lens), size, ids[used:], start, case.causal))
    order = rng.permutation(case.rows).astype(np.int32) if case.shuffled_rows else None
    return Plan(tuple(levels), positions(case), order), total


def _level(
    qo: Any, pages: list[int], lens: list[int], size: int, ids: Any, start: list[int], causal: bool
) -> Level:
    last = [length - (n - 1) * size if n else 0 for n, length in zip(pages, lens, strict=True)]
    return Level(
        np.asarray(qo, np.int32),
        np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
        ids,
        np.asarray(last, np.int32),
        np.asarray(start, np.int32),
        causal,
    )


def make_items(case: Case, plan: Plan) -> Work:
    shape = TileShape(
        "wide", case.tile_rows, 2**30, case.workers, case.granule, False, case.granule
    )
    size = 1 if case.ragged else case.page_size
    return make_work(
        [(0, plan)], Problem(case.group, size, case.num_kv_heads, case.window, (shape,))
    )


class Bench:
    """One case on the device: inputs, launch, merge, and the reference."""

    def __init__(self, case: Case, variant: wide.WideVariant, seed: int, poison: bool) -> None:
        import torch

        self.torch, self.case, self.variant = torch, case, variant
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.plan, self.num_pages = make_plan(case, rng)
        self.work = make_items(case, self.plan)
        self.dtype = torch.float16 if case.dtype == "fp16" else torch.bfloat16
        width = (case.num_kv_heads, case.head_dim)
        self.q = self._randn(case.rows, case.num_qo_heads, case.head_dim)
        self.o = torch.full_like(self.q, float("nan"))
        self.lse = torch.full((case.rows, case.num_qo_heads), float("nan"), device="cuda")
        if case.ragged:
            self.k, self.v = (
                self._randn(self.num_pages, *width),
                self._randn(self.num_pages, *width),
            )
            self.maps = wide.ragged_maps(
                variant, self.k.data_ptr(), self.v.data_ptr(), self.num_pages, case.num_kv_heads
            )
        else:
            self._fill_pool(poison)
        self._upload(rng)

    def _randn(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=self.dtype)

    def _fill_pool(self, poison: bool) -> None:
        case, torch = self.case, self.torch
        geometry = PoolGeometry(
            2,
            self.num_pages,
            case.page_size,
            case.num_kv_heads,
            case.head_dim,
            case.layout,
            case.dtype,
        )
        pool = self._randn(2, *geometry.layer_shape)
        self.k = torch.zeros(0)
        slots = pool[1] if case.layout == "NHD" else pool[1].transpose(2, 3)
        if poison:
            pool[0].fill_(float("nan"))
            for level in self.plan.levels:
                for s, last in enumerate(level.kv_last_page_len):
                    end = level.kv_indptr[s + 1]
                    if end > level.kv_indptr[s]:
                        slots[int(level.kv_indices[end - 1]), :, int(last) :] = float("nan")
        self.pool, self.slots = pool, slots
        self.maps = wide.paged_maps(geometry, pool.data_ptr())

    def _upload(self, rng: np.random.Generator) -> None:
        case, torch, work = self.case, self.torch, self.work
        device = lambda x: torch.from_numpy(np.ascontiguousarray(x)).cuda()  # noqa: E731
        items = work.launches[0].items.copy() if work.launches else np.zeros((0, 8), np.int32)
        items[:, 0] = 0 if case.ragged else 1
        if case.bucketed:
            cost = np.floor(4 * np.log2(np.maximum(items[:, 4], 1)))
            items = items[np.lexsort((items[:, 4], items[:, 3], -cost))]
        self.items, self.indices = device(items), device(work.kv_indices)
        self.order, self.positions = device(work.order), device(work.positions)
        rows = max(work.merges.num_partial_rows, 1) * case.num_kv_heads
        self.partial_o = torch.full((rows, case.head_dim), float("nan"), device="cuda")
        self.partial_lse = torch.full((rows,), float("nan"), device="cuda")
        self.schedule = torch.zeros(2, dtype=torch.int32, device="cuda")
        longest = case.shared + max(case.kv_lens) if case.mask else 1
        self.mask = rng.random((case.rows, longest)) < 0.5
        if case.rows > 1:
            self.mask[1] = False
        padded = np.zeros((case.rows, longest + 3), bool)  # rows start at odd bits
        padded[:, :longest] = self.mask
        bits = np.packbits(padded.ravel(), bitorder="little")
        self.bits = device(np.concatenate([bits, np.zeros(64, np.uint8)]))
        self.bit_offsets = device(np.arange(case.rows, dtype=np.int64) * (longest + 3))
        self.block = wide.argument_block(
            q=self.q.data_ptr(),
            o=self.o.data_ptr(),
            lse=self.lse.data_ptr(),
            items=self.items.data_ptr(),
            kv_indices=self.indices.data_ptr(),
            order=self.order.data_ptr(),
            positions=self.positions.data_ptr(),
            mask_bits=self.bits.data_ptr(),
            mask_row_offsets=self.bit_offsets.data_ptr(),
            partial_o=self.partial_o.data_ptr(),
            partial_lse=self.partial_lse.data_ptr(),
            schedule=self.schedule.data_ptr(),
            sm_scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap,
            window_left=case.window,
            num_items=len(items),
            num_kv_heads=case.num_kv_heads,
            group_size=case.group,
            head_block=case.head_block,
            num_pages=self.num_pages,
        )

    def launch(self, kernel: Any) -> None:
        import cupy

        with cupy.cuda.Stream.from_external(self.torch.cuda.current_stream()):
            wide.launch(kernel, self.variant, self.maps, self.block, SMS)

    def merge(self) -> None:
        """What the backend's merge kernel does: each listed chunk from its partial states."""
        torch, case, merges = self.torch, self.case, self.work.merges
        heads, group, chunk = case.num_kv_heads, case.group, merges.chunk_rows
        part_o = self.partial_o.view(-1, heads, case.head_dim).double()
        part_lse = self.partial_lse.view(-1, heads).double()
        for m, first in enumerate(merges.chunks):
            members = merges.members[merges.indptr[m] : merges.indptr[m + 1]]
            for i in range(chunk):
                packed = int(first) * chunk + i
                row = int(self.work.order[packed // group])
                cols = torch.arange(heads, device="cuda") * group + packed % group
                if len(members) == 0:
                    self.o[row, cols], self.lse[row, cols] = 0.0, float("-inf")
                    continue
                index = torch.as_tensor(members + i, device="cuda", dtype=torch.long)
                lse = torch.logsumexp(part_lse[index], 0)
                weight = torch.exp(part_lse[index] - torch.where(lse.isinf(), 0.0, lse))
                self.o[row, cols] = (part_o[index] * weight[..., None]).sum(0).to(self.dtype)
                self.lse[row, cols] = lse.float()

    def _keys(self, level: Level, s: int) -> tuple[Any, Any]:
        """K and V `[keys, heads, head_dim]` in float64 of one segment."""
        torch = self.torch
        ids = level.kv_indices[level.kv_indptr[s] : level.kv_indptr[s + 1]]
        index = torch.as_tensor(ids.copy(), device="cuda", dtype=torch.long)
        if self.case.ragged:
            return self.k[index].double(), self.v[index].double()
        width = (-1, self.case.num_kv_heads, self.case.head_dim)
        keys = max(0, (len(ids) - 1) * self.case.page_size + int(level.kv_last_page_len[s]))
        both = self.slots[index]
        return both[:, 0].reshape(width)[:keys].double(), both[:, 1].reshape(width)[:keys].double()

    def reference(self, sample: int = 0) -> tuple[Any, Any, Any]:
        """Plan rows (all, or some), and their o and lse in float64."""
        torch, case = self.torch, self.case
        rows = np.arange(case.rows)
        if sample and sample < case.rows:
            rows = np.unique(np.linspace(0, case.rows - 1, sample).astype(int))
        o = torch.zeros(len(rows), case.num_qo_heads, case.head_dim, dtype=torch.double).cuda()
        lse = torch.full((len(rows), case.num_qo_heads), -torch.inf, dtype=torch.double).cuda()
        for level in self.plan.levels:
            for s in range(len(level.kv_last_page_len)):
                low, high = level.qo_indptr[s], level.qo_indptr[s + 1]
                mine = np.flatnonzero((rows >= low) & (rows < high))
                k, v = self._keys(level, s)
                if len(mine) and len(k):
                    self._add(o, lse, mine, rows[mine], k, v, level, int(level.kv_start[s]))
        return rows, o, lse

    def _add(
        self, o: Any, lse: Any, at: Any, rows: Any, k: Any, v: Any, level: Level, start: int
    ) -> None:
        torch, case = self.torch, self.case
        q = self.q[torch.as_tensor(self.work.order[rows].astype(np.int64), device="cuda")].double()
        k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
        s = torch.einsum("nhd,mhd->nhm", q, k) * case.head_dim**-0.5
        if case.soft_cap:
            s = case.soft_cap * torch.tanh(s / case.soft_cap)
        key = start + np.arange(len(k))
        mine = self.plan.positions[rows][:, None]
        seen = np.ones((len(rows), len(k)), bool)
        if level.causal:
            seen &= key <= mine
        if case.window >= 0:
            seen &= key >= mine - case.window
        if case.mask:
            seen &= self.mask[rows][:, key]
        s = s.masked_fill(~torch.from_numpy(seen).cuda()[:, None], -torch.inf)
        at = torch.as_tensor(at, device="cuda")
        both = torch.stack([lse[at], torch.logsumexp(s, 2)])
        total = torch.logsumexp(both, 0)
        safe = torch.where(total.isinf(), 0.0, total)
        added = torch.einsum("nhm,mhd->nhd", torch.exp(s - safe[..., None]), v)
        o[at] = o[at] * torch.exp(lse[at] - safe)[..., None] + added
        lse[at] = total

    def errors(self, sample: int = 0) -> tuple[float, float]:
        """Largest error of o (relative above 1, where fp16 has no 1e-3) and of lse (absolute).

        Infinite when there is a NaN or an inexact empty state.
        """
        torch = self.torch
        rows, o, lse = self.reference(sample)
        index = torch.as_tensor(self.work.order[rows].astype(np.int64), device="cuda")
        got_o, got_lse = self.o[index].double(), self.lse[index].double()
        empty = lse.isinf()
        if not bool((got_lse[empty] == -torch.inf).all() and (got_o[empty] == 0).all()):
            return float("inf"), float("inf")
        worst_lse = (got_lse[~empty] - lse[~empty]).abs()
        worst_o = ((got_o - o).abs() / o.abs().clamp(min=1.0)).max()
        worst = worst_lse.max() if worst_lse.numel() else torch.zeros(())
        return tuple(float("inf") if x.isnan() else float(x) for x in (worst_o, worst))  # type: ignore[return-value]


def case_variant(case: Case) -> wide.WideVariant:
    page = 0 if case.ragged else case.page_size
    return wide.variant(case.head_dim, case.dtype, page, case.mask, case.soft_cap > 0)  # type: ignore[arg-type]


_LOADED: dict[tuple[Spec, tuple[str, ...]], Any] = {}


def load(variant: wide.WideVariant, extra: tuple[str, ...] = ()) -> Any:
    import os
    import tempfile

    import cupy

    key = (variant.spec, extra)
    if key not in _LOADED:
        spec = Spec(variant.spec.source, variant.spec.options + extra)
        compiled = compile_spec(spec, "sm_90a")
        with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
            file.write(compiled.cubin)
        module = cupy.RawModule(path=file.name)
        kernel = module.get_function(wide.ENTRY)
        kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
        os.unlink(file.name)
        _LOADED[key] = kernel
    return _LOADED[key]


# --- correctness ---------------------------------------------------------------------------------


def grid(**fixed: Any) -> Iterator[Case]:
    """Short and long, ragged and aligned query and key counts, in one batch and alone."""
    for qo, kv in (((1,), (54,)), ((37, 1, 128), (97, 16, 512)), ((577, 17), (2048, 17))):
        for causal in (True, False):
            yield Case(f"{qo}x{kv}", qo, kv, causal=causal, **fixed)
    yield Case("kv<qo", (127, 40), (54, 1), **fixed)
    yield Case("split", (200,), (2048,), causal=True, workers=512, **fixed)


def groups() -> dict[str, list[Case]]:
    one = {"num_qo_heads": 1, "num_kv_heads": 1}
    return {
        "first": [
            Case("1 tile", (64,), (128,), causal=False, **one),
            Case("128 rows", (128,), (128,), causal=False, **one),
            Case("2 tiles", (128,), (256,), causal=False, **one),
            Case("partial tile", (100,), (300,), causal=False, **one),
            Case("causal", (256,), (256,), **one),
            *grid(),
        ],
        "layouts": [
            *grid(layout="HND", page_size=32),
            *grid(page_size=64, dtype="bf16"),
            *grid(page_size=8, layout="HND", shuffled_rows=True),
        ],
        "ragged": [*grid(ragged=True), *grid(ragged=True, dtype="bf16", shuffled_rows=True)],
        "dims": [
            *grid(head_dim=64),
            *grid(head_dim=192),
            *grid(head_dim=256, layout="HND"),
            *grid(head_dim=64, ragged=True),
            *grid(num_qo_heads=7, num_kv_heads=1),
        ],
        "rare": [
            *grid(window=33),
            *grid(window=200, page_size=64),
            *grid(soft_cap=5.0),
            *grid(mask=True),
            *grid(mask=True, window=100, soft_cap=30.0, layout="HND"),
            *grid(mask=True, ragged=True),
        ],
        "sanitized": [
            Case("partial tile", (100,), (300,), **one),
            Case("split", (40, 3), (700, 20), num_qo_heads=2, num_kv_heads=1, workers=64),
        ],
        "cascade": [
            Case("two levels", (1,) * 40, (50,) * 40, shared=1000, shuffled_rows=True),
            Case("uneven", (3, 1, 20), (5, 100, 333), shared=4096, workers=1024),
            Case("window", (3, 1, 20), (5, 100, 333), shared=1000, window=150),
            Case("mask", (30, 1, 20), (50, 100, 333), shared=1000, mask=True),
        ],
    }


TOLERANCE: Final = {"fp16": 1e-3, "bf16": 1e-2}


def check(name: str, cluster: int) -> int:
    wrong = 0
    for number, case in enumerate(groups()[name]):
        variant = dataclasses.replace(case_variant(case), cluster=cluster)
        case = dataclasses.replace(case, granule=variant.tile_keys, tile_rows=variant.tile_rows)
        bench = Bench(case, variant, seed=number, poison=True)
        for repeat in range(2):  # the second finds what the first left in the schedule
            bench.o.fill_(float("nan"))
            bench.lse.fill_(float("nan"))
            bench.launch(load(variant))
            bench.torch.cuda.synchronize()
            bench.merge()
            error_o, error_lse = bench.errors()
            bad = not (error_o <= TOLERANCE[case.dtype] and error_lse <= 1e-3)
            wrong += bad
            if bad or repeat == 0:
                mark = "WRONG" if bad else "ok"
                print(f"{mark} {name} o {error_o:.2e} lse {error_lse:.2e} {case}", flush=True)
    return wrong


# --- speed ---------------------------------------------------------------------------------------

_SKEWED: Final = (
    *(203, 897, 385, 1198, 1332, 87, 68, 3723, 225, 199, 8020, 626),
    *(3704, 645, 1421, 132, 1393, 4318, 810, 2334, 1663, 87, 2534, 1126),
)
_HEADS: Final = {"num_qo_heads": 32, "num_kv_heads": 8}


def timed_cases() -> dict[str, Case]:
    decode = (1,) * 256
    return {
        "1x8k": Case("1x8k", (8192,), (8192,), **_HEADS),
        "16x1k": Case("16x1k", (1024,) * 16, (1024,) * 16, **_HEADS),
        "8x512": Case("8x512", (512,) * 8, (8704,) * 8, **_HEADS),
        "skewed": Case("skewed", _SKEWED, _SKEWED, **_HEADS),
        "1x8k-ragged": Case("1x8k-ragged", (8192,), (8192,), ragged=True, **_HEADS),
        "16x1k-ragged": Case("16x1k-ragged", (1024,) * 16, (1024,) * 16, ragged=True, **_HEADS),
        "8x512-ragged": Case("8x512-ragged", (512,) * 8, (8704,) * 8, ragged=True, **_HEADS),
        "skewed-ragged": Case("skewed-ragged", _SKEWED, _SKEWED, ragged=True, **_HEADS),
        "gqa-32k": Case("gqa-32k", decode, (1,) * 256, 32768, False, causal=False, **_HEADS),
        "mha-32k": Case("mha-32k", decode, (1,) * 256, 32768, False, 32, 32, causal=False),
        "1x8k-64": Case("1x8k-64", (8192,), (8192,), head_dim=64, **_HEADS),
        "1x8k-256": Case("1x8k-256", (8192,), (8192,), head_dim=256, **_HEADS),
        "1x8k-mask": Case("1x8k-mask", (2048,), (8192,), mask=True, **_HEADS),
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """A change to try: the kernel's shape, its definitions, the order of the units."""

    shape: dict[str, int]
    extra: tuple[str, ...] = ()
    bucketed: bool = False
    head_block: int = 1


VARIANTS: Final[dict[str, Variant]] = {
    "base": Variant({}),
    "2-heads": Variant({}, head_block=2),
    "4-heads": Variant({}, head_block=4),
    "8-heads": Variant({}, head_block=8),
    "pair-1": Variant({"cluster": 2}, head_block=1),
    "pair-2": Variant({"cluster": 2}, head_block=2),
    "pair-4": Variant({"cluster": 2}, head_block=4),
    "pair-8": Variant({"cluster": 2}, head_block=8),
    "pair-4-half": Variant({"cluster": 2}, ("-DkHalfTiles=1",), head_block=4),
    "pair-4-no-turns": Variant({"cluster": 2}, ("-DkPingPong=0",), head_block=4),
    "4-buckets": Variant({}, (), True, 4),
    "8-buckets": Variant({}, (), True, 8),
    "no-turns": Variant({}, ("-DkPingPong=0",), head_block=4),
    "lazy": Variant({}, ("-DkLazyRescale=1",), head_block=4),
    "half": Variant({}, ("-DkHalfTiles=1",), head_block=4),
    "1-query": Variant({"query_stages": 1}, head_block=4),
    "144": Variant({"tile_keys": 144}, head_block=4),
    "160": Variant({"tile_keys": 160, "query_stages": 1}, head_block=4),
    "96": Variant({"tile_keys": 96, "stages": 3}, head_block=4),
    "3-consumers": Variant({"consumers": 3}, head_block=4),
}


def measure(bench: Bench, kernel: Any, calls: int = 6, replays: int = 7) -> float:
    """Median milliseconds of one call, from replays of a graph of `calls`."""
    torch = bench.torch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bench.launch(kernel)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            bench.launch(kernel)
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return float(np.median(times[1:]))


def time_cases(variants: list[str], cases: list[str]) -> None:
    for case_name in cases:
        for variant_name in variants:
            case = timed_cases()[case_name]
            change = VARIANTS[variant_name]
            variant = dataclasses.replace(case_variant(case), **change.shape)  # type: ignore[arg-type]
            case = dataclasses.replace(
                case,
                granule=variant.tile_keys,
                tile_rows=variant.tile_rows,
                workers=SMS // variant.cluster,
                bucketed=change.bucketed,
                head_block=min(change.head_block, case.num_kv_heads),
            )
            try:
                bench = Bench(case, variant, seed=1, poison=False)
                kernel = load(variant, change.extra)
                bench.launch(kernel)
                bench.torch.cuda.synchronize()
                error = bench.errors(sample=24)[0] if not bench.work.merges.members.size else -1.0
                ms = measure(bench, kernel)
                print(
                    f"{case_name:14} {variant_name:14} {ms:8.4f} ms {case.flops / ms / 1e9:7.1f}"
                    f" TFLOP/s  error {error:.1e}  items {len(bench.items)}"
                    f" partial rows {bench.work.merges.num_partial_rows}",
                    flush=True,
                )
            except RuntimeError as problem:
                print(f"{case_name:14} {variant_name:14} failed: {problem}", flush=True)


def main(arguments: list[str]) -> int:
    started = time.time()
    if arguments[0].startswith("check"):
        cluster = 2 if arguments[0] == "check-pairs" else 1
        wrong = sum(check(name, cluster) for name in arguments[1:] or groups())
        print(f"{wrong} wrong, {time.time() - started:.0f} s")
        return 1 if wrong else 0
    chosen = arguments[1:]
    split = chosen.index("--") if "--" in chosen else len(chosen)
    time_cases(chosen[:split] or ["base"], chosen[split + 1 :] or list(timed_cases()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
