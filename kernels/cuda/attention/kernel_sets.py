"""Sets of kernels for a batch: usual ones, and sets for batches of only short or long runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from kernels.cuda.attention.config import AttentionShape
from kernels.cuda.attention.kernels import (
    attend_kernels,
    only_kernel,
    planner_shape,
    wide_kernel,
    wide_variant,
)
from kernels.cuda.common.extremes import greatest
from kernels.cuda.common.kernel import Kernel
from kernels.cuda.narrow.variants import few_rows_kernels, parts_of, short_decode_kernels
from kernels.cuda.plan.costs import H200, NO_COSTS, SetCosts, UnitCosts, WideName
from kernels.cuda.plan.runs import KernelWork
from kernels.cuda.plan.tiles import NO_SPLITS, ROWS, PlannerConfig, Splits
from kernels.cuda.wide import variants as wide

MOST_SHAPES: Final = 64
FEW_ROWS: Final = 64
"""Packed rows of a segment, at most, in batches of few rows."""
SPLIT_KEYS: Final = 2048
"""Keys of a fixed split: eight kv heads of 32k keys fill a device, and a prefill of 8k keys has few
partial states. The first one may be shorter (`fixed_splits`)."""
FIRST_SPLIT: Final = 1024
FIRST_SPLIT_FP8: Final = 512
"""Keys of a row's first split, of 16-bit and of fp8 pools."""


BatchKind = Literal[
    "usual",
    "short decode",
    "short prefill",
    "long prefill",
    "wide whole",
    "wide fixed",
    "few whole",
    "few fixed",
    "pair whole",
    "pair fixed",
    "few beside many",
]
"""Class of a batch. Prefills: each sequence has enough rows for the kernel of many rows. Wide, few,
pair: one kernel takes all rows, that of many rows, of 64, or of 64 with two CTAs a multiprocessor;
it splits keys where that pays, or at fixed positions, as `invariant` does."""

ALONE: Final[Mapping[str, tuple[BatchKind, BatchKind]]] = {
    "wide": ("wide whole", "wide fixed"),
    "few": ("few whole", "few fixed"),
    "pair": ("pair whole", "pair fixed"),
}


@dataclass(frozen=True, slots=True, eq=False)
class KernelSet:
    """Kernels for increasing numbers of packed rows, with their costs for the planner.

    `few_rows` has replacements of the first for few rows, by rows and `heads_first`; `joining` is
    the one that joins the fixed splits of a run; `unit` what units of the `largest`
    one take on Hopper.
    """

    kernels: tuple[Kernel, ...]
    few_rows: dict[tuple[int, bool], Kernel]
    planner: PlannerConfig
    joining: Kernel | None = None
    largest: wide.WideVariant | None = None
    unit: UnitCosts = NO_COSTS

    @property
    def alone(self) -> bool:
        """Whether one kernel takes all rows."""
        return len(self.kernels) == 1

    def kernel(self, launch: KernelWork) -> Kernel:
        """The launch's kernel, specialised for its rows where these are few."""
        if launch.joins and self.joining is not None:
            return self.joining
        if launch.index > 0 or not self.few_rows:
            return self.kernels[launch.index]
        return self.few_rows[greatest(launch.items[:, ROWS]), launch.heads_first]


@lru_cache(MOST_SHAPES)
def kernel_sets(
    config: AttentionShape,
    arch: str,
    multiprocessors: int,
    split_keys: int = 0,
    pool_page: int = 16,
) -> Mapping[BatchKind, KernelSet]:
    """The sets that there are for a configuration; always the usual one.

    With `split_keys` all rows have the same arithmetic: one kernel serves them, or, where none has
    many rows, another one like it. Ragged keys have that of a pool of pages of `pool_page`.
    """
    options = (arch, config.head_dim, config.compute, config.dtype)
    page_size = 0 if config.contiguous else config.page_size

    def made_of(
        kernels: Sequence[Kernel | wide.WideVariant],
        few_rows: dict[tuple[int, bool], Kernel] | None = None,
        splits: Splits = NO_SPLITS,
        joining: Kernel | None = None,
    ) -> KernelSet:
        last = kernels[-1] if isinstance(kernels[-1], wide.WideVariant) else None
        unit = NO_COSTS if last is None else unit_costs(last, H200.sets)
        made = tuple(wide_kernel(k) if isinstance(k, wide.WideVariant) else k for k in kernels)
        planner = _planner(config, made, multiprocessors, splits, joining is not None)
        return KernelSet(made, few_rows or {}, planner, joining, last, unit)

    fixed_page = pool_page if config.contiguous else page_size
    splits = fixed_splits(split_keys, config, fixed_page) if split_keys else NO_SPLITS
    only = only_kernel(config, arch, fixed_page if split_keys else page_size)
    if only is not None:
        return {"usual": made_of([only], splits=splits)}
    values = config.v_head_dim
    variant = wide_variant(*options, page_size, config.scoring, config.masked, values)
    scale = config.scoring.sm_scale
    if split_keys and not wide.supports(*options, fixed_page, scale, values):
        variant = None
    if variant is not None and config.head_dim != values and not split_keys:
        return {"usual": made_of([wide.few_variant(variant), variant])}
    usual = attend_kernels(*options, config.general, variant)
    if split_keys:
        if variant is None or variant.by_token:
            return {"usual": made_of(usual[-1:], splits=splits)}
        alike: dict[BatchKind, wide.WideVariant]
        alike = {"usual": variant, "few fixed": wide.few_variant(variant)}
        if (pair := wide.pair_variant(variant)) is not None:
            alike["pair fixed"] = pair
        sets: dict[BatchKind, KernelSet] = {}
        for kind, one in alike.items():
            joins = not config.masked and one.ctas == 1
            joining = wide_kernel(wide.joining_variant(one)) if joins else None
            sets[kind] = made_of([one], splits=splits, joining=joining)
        if pair is not None:
            both = (pair, variant)
            sets["few beside many"] = made_of(both, splits=splits, joining=sets["usual"].joining)
        return sets
    plain = not (config.general or config.contiguous)  # others are not worth kernels of their own
    few_rows = few_rows_kernels(*options) if plain else {}
    largest = variant or usual[-1]
    made: dict[BatchKind, KernelSet] = {"usual": made_of((*usual[:-1], largest), few_rows)}
    if plain and (short := short_decode_kernels(*options)):
        made["short decode"] = made_of((short[8, False], *usual[1:-1], largest), short)
    if variant is not None:
        if (other := wide.short_variant(variant)) is not None:
            made["short prefill"] = made_of((*usual[:-1], other), few_rows)
        if (other := wide.long_variant(variant)) is not None:
            made["long prefill"] = made_of((*usual[:-1], other), few_rows)
    if plain and variant is not None:  # by one kernel, also as `invariant` takes them
        splits = fixed_splits(SPLIT_KEYS, config, page_size)
        for alone, one in wide.alone_variants(variant).items():
            whole, fixed = ALONE[alone]
            made |= {fixed: made_of([one], splits=splits), whole: made_of([one])}
    return made


def fixed_splits(split_keys: int, config: AttentionShape, page_size: int) -> Splits:
    """Where rows are split: at multiples of `split_keys`, whole pages, and once before the first.

    So a short sequence is read by two CTAs, while a long one has a split more. At head_dim 64 one
    costs more than that gains.
    """
    wanted = FIRST_SPLIT_FP8 if config.dtype.startswith("fp8") else FIRST_SPLIT
    first = page_size * -(-wanted // page_size)
    return Splits(split_keys, first if config.head_dim > 64 and first < split_keys else 0)


def unit_costs(variant: wide.WideVariant, costs: SetCosts) -> UnitCosts:
    """What a unit of the wide kernel takes beside others of its launch."""
    if variant.by_token:
        name: WideName = "token"
    elif variant.consumers == 1:
        name = "few" if variant.ctas == 1 else "short" if variant.tile_keys == 64 else "pair"
    else:
        name = "wide" if variant.consumers == 2 else "long"
    return costs.unit(name, variant.head_dim, variant.converts, variant.tile_keys)


def _planner(
    config: AttentionShape,
    kernels: Sequence[Kernel],
    multiprocessors: int,
    splits: Splits,
    leads: bool,
) -> PlannerConfig:
    parts = 1 if config.general else parts_of(config.head_dim, config.dtype, config.group_size)
    shapes = [
        planner_shape(
            kernel,
            config,
            multiprocessors,
            kernel is kernels[-1],
            parts > 1 and kernel is kernels[0],
        )
        for kernel in kernels
    ]
    return PlannerConfig(
        group_size=config.group_size,
        page_size=config.page_size,
        num_kv_heads=config.num_kv_heads,
        window_left=config.scoring.window_left,
        shapes=tuple(shapes),
        page_bytes=config.page_bytes,
        splits=splits,
        leads=leads,
    )
