"""One batch on the device: inputs, launch, merge, and the reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from kernels.backend import Level, PoolGeometry
from kernels.compile import Spec, compile_spec
from kernels.cuda.attention.config import LOG2E
from kernels.cuda.common.structs import VISIBLE_PARAMS, WIDE_PARAMS, params
from kernels.cuda.kv.tensor_maps import paged_maps, ragged_maps, ragged_shape
from kernels.cuda.visible import table as visible
from kernels.cuda.wide import variants as wide
from tests.cuda.wide_cases import SMS, Case, case_variant, make_items, make_plan, mask_of


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
            shape = ragged_shape(self.num_pages, *width, variant.tile_keys)
            self.maps = ragged_maps(shape, self.k.data_ptr(), self.v.data_ptr(), case.dtype)
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
        self.maps = paged_maps(geometry, pool.data_ptr())

    def _upload(self, rng: np.random.Generator) -> None:
        case, torch, work = self.case, self.torch, self.work
        device = lambda x: torch.from_numpy(np.ascontiguousarray(x)).cuda()  # noqa: E731
        items = work.kernels[0].items.copy() if work.kernels else np.zeros((0, 8), np.int32)
        items[:, 0] = 0 if case.ragged else 1
        self.items, self.indices = device(items), device(work.kv_indices)
        self.order, self.positions = device(work.order), device(work.positions)
        rows = max(work.merges.num_partial_rows, 1) * case.num_kv_heads
        self.partial_o = torch.full((rows, case.head_dim), float("nan"), device="cuda")
        self.partial_lse = torch.full((rows,), float("nan"), device="cuda")
        self.schedule = torch.zeros(2, dtype=torch.int32, device="cuda")
        longest = case.shared + max(case.kv_lens) if case.mask else 1
        self.mask = mask_of(case, longest, rng)
        padded = np.zeros((case.rows, longest + 3), bool)  # rows start at odd bits
        padded[:, :longest] = self.mask
        bits = np.packbits(padded.ravel(), bitorder="little")
        self.bits = device(np.concatenate([bits, np.zeros(64, np.uint8)]))
        self.bit_offsets = device(np.arange(case.rows, dtype=np.int64) * (longest + 3))
        words = visible.table_words(items, self.variant.tile_keys)
        size = max(1, len(items)) * words * 2
        self.visible = torch.full((size,), -1, dtype=torch.int32, device="cuda")
        self.finder = params(
            VISIBLE_PARAMS,
            items=self.items.data_ptr(),
            positions=self.positions.data_ptr(),
            mask_bits=self.bits.data_ptr(),
            mask_row_offsets=self.bit_offsets.data_ptr(),
            tiles=self.visible.data_ptr(),
            words=words,
            tile_keys=self.variant.tile_keys,
            group_size=case.group,
            window_left=case.window,
        )
        self.block = params(
            WIDE_PARAMS,
            q=self.q.data_ptr(),
            o=self.o.data_ptr(),
            lse=self.lse.data_ptr(),
            items=self.items.data_ptr(),
            kv_indices=self.indices.data_ptr(),
            order=self.order.data_ptr(),
            positions=self.positions.data_ptr(),
            mask_bits=self.bits.data_ptr(),
            mask_row_offsets=self.bit_offsets.data_ptr(),
            visible=self.visible.data_ptr(),
            visible_words=words,
            partial_o=self.partial_o.data_ptr(),
            partial_lse=self.partial_lse.data_ptr(),
            schedule=self.schedule.data_ptr(),
            scale=LOG2E * (case.soft_cap or case.head_dim**-0.5),
            cap_scale=case.head_dim**-0.5 / case.soft_cap if case.soft_cap else 0.0,
            window_left=case.window,
            num_items=len(items),
            own_units=min(len(items) * case.num_kv_heads, SMS * self.variant.blocks),
            num_kv_heads=case.num_kv_heads,
            group_size=case.group,
            head_block=wide.heads_together(
                case.num_kv_heads, len(items), len(np.unique(items[:, 3]))
            ),
            num_pages=self.num_pages,
            head_blocks=self.maps.head_blocks,
            head_groups=self.maps.head_groups,
        )

    def launch(self, kernel: Any) -> None:
        """The backend's steps: the table of a mask's tiles, then attention."""
        import cupy

        from kernels.cuda.device.launch import Launcher

        count, variant = len(self.items), self.variant
        if count == 0:
            return
        with cupy.cuda.Stream.from_external(self.torch.cuda.current_stream()):
            if self.case.mask:
                finder = load_spec(visible.SPEC, visible.ENTRY)
                grid = count * int(self.finder["words"][0])
                Launcher(finder, grid, visible.THREADS, 0, self.finder.tobytes())()
            struct = self.maps.packed + self.block.tobytes()
            sizes = (min(count * self.case.num_kv_heads, SMS * variant.blocks), variant.threads)
            Launcher(kernel, *sizes, variant.shared_bytes, struct, wide.PARAMETERS)()

    def merge(self) -> None:
        """The backend's merge kernel: each listed chunk from its partial states."""
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


def launch_errors(case: Case, seed: int) -> Iterator[tuple[float, float]]:
    """`Bench.errors` of two launches: the second finds the first one's unit counters."""
    variant = case_variant(case)
    case = dataclasses.replace(case, granule=variant.tile_keys)
    bench = Bench(case, variant, seed=seed, poison=True)
    for _ in range(2):
        bench.o.fill_(float("nan"))
        bench.lse.fill_(float("nan"))
        bench.launch(load(variant))
        bench.torch.cuda.synchronize()
        bench.merge()
        yield bench.errors()


_LOADED: dict[Spec, Any] = {}


def load(variant: wide.WideVariant) -> Any:
    """The variant's kernel, compiled now and loaded once."""
    return load_spec(variant.spec, wide.ENTRY, variant.shared_bytes)


def load_spec(spec: Spec, entry: str, shared_bytes: int = 0) -> Any:
    """A kernel with its dynamic shared memory, compiled now and loaded once."""
    import os
    import tempfile

    import cupy

    if spec not in _LOADED:
        with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
            file.write(compile_spec(spec, "sm_90a").cubin)
        kernel = cupy.RawModule(path=file.name).get_function(entry)
        if shared_bytes:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        os.unlink(file.name)
        _LOADED[spec] = kernel
    return _LOADED[spec]
