"""Sets of kernels for a batch: usual ones, and sets for batches of only short or long runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from kernels.backend import Plan
from kernels.cuda.attention.config import AttentionShape
from kernels.cuda.attention.kernels import (
    attend_kernels,
    planner_shape,
    wide_kernel,
    wide_variant,
)
from kernels.cuda.common.extremes import greatest, least, total
from kernels.cuda.common.kernel import Kernel
from kernels.cuda.narrow.variants import few_rows_kernels, parts_of, short_decode_kernels
from kernels.cuda.plan.merges import NOTHING
from kernels.cuda.plan.runs import KernelWork
from kernels.cuda.plan.tiles import NO_SPLITS, ROWS, Int, PlannerConfig, Splits
from kernels.cuda.wide import variants as wide

MOST_SHAPES: Final = 64
SHORT_DECODE: Final = 128
"""Keys a narrow warp, of a device full of them, up to which a decode is short."""
FEW_ROWS: Final = 64
"""Packed rows of a segment, at most, in batches of few rows."""
SPLIT_KEYS: Final = 2048
"""Keys of a fixed split: eight kv heads of 32k keys fill a device, and a prefill of 8k keys has few
partial states. The first one may be shorter (`fixed_splits`)."""
FIRST_SPLIT: Final = 1024
FIRST_SPLIT_FP8: Final = 512
"""Keys of a row's first split, of 16-bit and of fp8 pools."""
PAIR_KEYS: Final = 3000
"""Keys of all heads a multiprocessor from which few rows are read by two CTAs each."""
PAIR_TILES: Final = {128: 1.5, 192: 3.0}
"""Tiles of many rows for each run of few rows, by the tile's keys, up to which two CTAs each take
both."""
SHORT_PREFILL: Final = 512
LONG_PREFILL: Final = 128
"""Keys of the longest sequence of a short prefill; and at least, on average, of one for three
warpgroups, where there is that kernel."""
SHARED_KEYS: Final = 1400
TWICE_KEYS: Final = 1000
TWICE_SEGMENTS: Final = 4
EMPTY_KEYS: Final = 1000
"""When `fast` gives segments of few and of many rows to two CTAs each, in keys of all heads a
multiprocessor: at least `SHARED_KEYS`; at most `TWICE_KEYS` that are then read twice, where at
least `TWICE_SEGMENTS` segments have many rows, else none; at most `EMPTY_KEYS` missing from the
last tiles of segments of few rows. Measured on 44 batches on a H200."""
CONVERTED: Final = 128
WHOLE_KEYS: Final = {CONVERTED: ((1, 0), (0, 400)), 64: ((100, 400), (0, 1200))}
WHOLE_SHARED: Final = 500
SPLIT_SHARED: Final = 2000
SPLIT_HEADS: Final = 4
"""The same unit, in fp8 pools and above head_dim 128, which differ by the tile's keys: between
what, in groups of up to 8 and above, the kernel of 64 rows takes the sequences of a decode, whole;
up to what it takes batches with segments of many rows; and up to what it splits those as
`invariant` does, where there are as many kv heads (fp8: and 64 rows at most, or keys would be
converted again and again). Measured on 61 batches on a H200."""
LONG_ROW_KEYS: Final = 1000
"""The same unit, above head_dim 128: from here on the kernel of 64 rows takes decodes of groups
that the narrow kernel does not take."""
ONE_TILE: Final = (96, 128)
FEW_KEYS: Final = {128: 1024, 192: 600}
"""Keys of sequences of short decodes, at most one CTA each, that the kernel of 64 rows takes: on
average and at most, in groups of up to 8; and at most, by its tile's keys, in groups of up to
16."""
BESIDE_KEYS: Final = 1500
BESIDE_TILES: Final = 20
"""Keys of few rows, and tiles of many rows, of all heads a multiprocessor, from which each kind has
a launch of its own."""


BatchKind = Literal[
    "usual",
    "few rows",
    "few whole",
    "short units",
    "few beside many",
    "short decode",
    "short prefill",
    "long prefill",
]
"""Class of a batch. Prefills: each sequence has enough rows for the kernel of many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelSet:
    """Kernels for increasing numbers of packed rows, with their costs for the planner.

    `few_rows` has replacements of the first for few rows, by rows and `heads_first`; `joining` is
    the one that joins the fixed splits of a run.
    """

    kernels: tuple[Kernel, ...]
    few_rows: dict[tuple[int, bool], Kernel]
    planner: PlannerConfig
    joining: Kernel | None = None

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
    variant = wide_variant(*options, page_size, config.scoring, config.masked)
    if split_keys and not wide.supports(
        *options, pool_page if config.contiguous else page_size, config.scoring.sm_scale
    ):
        variant = None
    usual = attend_kernels(*options, config.general, variant)
    if split_keys:
        splits = fixed_splits(split_keys, config, pool_page if config.contiguous else page_size)
        if variant is None or variant.by_token:
            return {"usual": _kernel_set(usual[-1:], {}, config, multiprocessors, splits)}
        alike: dict[BatchKind, wide.WideVariant]
        alike = {"usual": variant, "few rows": wide.few_variant(variant)}
        if (pair := wide.pair_variant(variant)) is not None:
            alike["short units"] = pair
        how = (config, multiprocessors, splits)
        sets: dict[BatchKind, KernelSet] = {
            kind: _kernel_set(
                (wide_kernel(one),),
                {},
                *how,
                None if config.masked or one.ctas > 1 else wide_kernel(wide.joining_variant(one)),
            )
            for kind, one in alike.items()
        }
        if pair is not None:
            both = wide_kernel(pair), wide_kernel(variant)
            sets["few beside many"] = _kernel_set(both, {}, *how, sets["usual"].joining)
        return sets
    plain = not (config.general or config.contiguous)  # others are not worth kernels of their own
    few_rows = few_rows_kernels(*options) if plain else {}
    made: dict[BatchKind, KernelSet]
    made = {"usual": _kernel_set(usual, few_rows, config, multiprocessors)}
    if plain and (short := short_decode_kernels(*options)):
        kernels = (short[8, False], *usual[1:])
        made["short decode"] = _kernel_set(kernels, short, config, multiprocessors)
    if variant is not None:
        others: dict[BatchKind, wide.WideVariant | None] = {
            "short prefill": wide.short_variant(variant),
            "long prefill": wide.long_variant(variant),
        }
        for kind, other in others.items():
            if other is not None:
                kernels = (*usual[:-1], wide_kernel(other))
                made[kind] = _kernel_set(kernels, few_rows, config, multiprocessors)
    if variant is not None and not config.contiguous:  # by one kernel, as `invariant` takes them
        how = (config, multiprocessors, fixed_splits(SPLIT_KEYS, config, page_size))
        for kind, alone in wide.alone_variants(variant).items():
            made[kind] = _kernel_set((wide_kernel(alone),), {}, *how)
        if "few rows" in made and "short units" not in made:  # where nothing else was measured
            kernels = made["few rows"].kernels
            made["few whole"] = _kernel_set(kernels, {}, config, multiprocessors)
    return made


def fixed_splits(split_keys: int, config: AttentionShape, page_size: int) -> Splits:
    """Where rows are split: at multiples of `split_keys`, whole pages, and once before the first.

    So a short sequence is read by two CTAs, while a long one has a split more. At head_dim 64 one
    costs more than that gains.
    """
    wanted = FIRST_SPLIT_FP8 if config.dtype.startswith("fp8") else FIRST_SPLIT
    first = page_size * -(-wanted // page_size)
    return Splits(split_keys, first if config.head_dim > 64 and first < split_keys else 0)


def _kernel_set(
    kernels: tuple[Kernel, ...],
    few_rows: dict[tuple[int, bool], Kernel],
    config: AttentionShape,
    multiprocessors: int,
    splits: Splits = NO_SPLITS,
    joining: Kernel | None = None,
) -> KernelSet:
    device = (config.head_dim, config.dtype, multiprocessors)
    parts = 1 if config.general else parts_of(*device[:2], config.group_size)
    shapes = [
        planner_shape(k, *device, k is kernels[-1], parts > 1 and k is kernels[0]) for k in kernels
    ]
    planner = PlannerConfig(
        group_size=config.group_size,
        page_size=config.page_size,
        num_kv_heads=config.num_kv_heads,
        window_left=config.scoring.window_left,
        shapes=tuple(shapes),
        page_bytes=config.page_bytes,
        splits=splits,
        leads=joining is not None,
    )
    return KernelSet(kernels, few_rows, planner, joining)


def fixed_kind(plans: Sequence[Plan], usual: PlannerConfig, pairs: bool) -> BatchKind:
    """The class of a batch whose rows are split at fixed positions; `pairs`: all are there.

    Two CTAs a multiprocessor hide what each of their units waits for. One by itself is sooner done
    with a unit, and with 128 rows it reads keys of many rows half as often.
    """
    rows, keys = _segments(plans, usual)
    if not len(rows):
        return "usual"
    few, shape = rows <= FEW_ROWS, usual.shapes[-1]
    if few.all():
        many = total(keys) * usual.num_kv_heads > PAIR_KEYS * shape.workers
        return "short units" if pairs and many else "few rows"
    tiles = -(rows // -shape.rows) * -(keys // -shape.granule)
    if pairs and total(tiles[~few]) <= PAIR_TILES[shape.granule] * np.count_nonzero(few):
        return "short units"
    if not (pairs and few.any()):
        return "usual"
    each = shape.workers / usual.num_kv_heads
    apart = total(keys[few]) > BESIDE_KEYS * each and total(tiles[~few]) > BESIDE_TILES * each
    return "few beside many" if apart else "usual"


def _segments(plans: Sequence[Plan], usual: PlannerConfig) -> tuple[Int, Int]:
    """Packed rows of every segment of every level, and its keys, in whole pages."""
    levels = [level for plan in plans for level in plan.levels if len(level.kv_start)]
    if not levels:
        return NOTHING, NOTHING
    rows = np.concatenate([level.qo_indptr[1:] - level.qo_indptr[:-1] for level in levels])
    pages = np.concatenate([level.kv_indptr[1:] - level.kv_indptr[:-1] for level in levels])
    return rows * usual.group_size, pages * usual.page_size


def shared_kind(plans: Sequence[Plan], usual: PlannerConfig) -> BatchKind:
    """The class of a batch of segments with few and many rows, where two CTAs could take both.

    That saves a launch, and tiles of 128 rows of which half are empty; but long segments of many
    rows are then read twice as often, and segments far shorter than a tile of keys cost a whole.
    """
    rows, keys = _segments(plans, usual)
    shape = usual.shapes[-1]
    few = rows <= usual.takes[-1]
    own, shared, tall = keys[few], keys[~few], rows[~few]
    if not len(tall):
        return "usual"
    each = shape.workers / usual.num_kv_heads
    wide = total(-(tall // -shape.rows) * shared)
    twice = total(-(tall // -FEW_ROWS) * shared) - wide
    short = int(own.sum())
    if -int((own // -shape.granule).sum()) * shape.granule - short > EMPTY_KEYS * each:
        return "usual"
    if twice > (TWICE_KEYS * each if len(tall) >= TWICE_SEGMENTS else 0):
        return "usual"
    least = SHARED_KEYS if len(own) else PAIR_KEYS
    return "short units" if wide + short >= least * each else "usual"


def whole_kind(plans: Sequence[Plan], usual: PlannerConfig) -> BatchKind:
    """The same above head_dim 128 and in fp8 pools, where two CTAs have no room."""
    rows, keys = _segments(plans, usual)
    shape = usual.shapes[-1]
    tall = rows[rows > usual.takes[-1]]
    if not len(tall) or 2 * len(tall) > len(rows):
        return "usual"
    work = total(-(rows // -FEW_ROWS) * keys) * usual.num_kv_heads
    if work <= WHOLE_SHARED * shape.workers:
        return "few whole"
    split = work <= SPLIT_SHARED * shape.workers and usual.num_kv_heads >= SPLIT_HEADS
    once = shape.granule != CONVERTED or greatest(tall) <= FEW_ROWS
    return "few rows" if split and once else "usual"


def decode_kind(
    plans: Sequence[Plan], usual: PlannerConfig, kinds: Collection[BatchKind], keys: int
) -> BatchKind:
    """The class of a batch of one row a sequence, which have `keys` keys in whole pages."""
    narrow, shape, group = usual.shapes[0], usual.shapes[-1], usual.group_size
    sequences = sum(len(plan.positions) for plan in plans)
    short = keys <= SHORT_DECODE * narrow.workers // usual.num_kv_heads
    each = shape.workers / usual.num_kv_heads
    if "few whole" in kinds and group <= FEW_ROWS:
        low, high = WHOLE_KEYS[shape.granule][group > 8]
        if low * each <= keys <= high * each:
            return "few whole"
        if shape.granule == CONVERTED:
            kinds = ()
    if "few rows" in kinds and group <= FEW_ROWS:
        if group > usual.takes[-1]:  # a tile of many rows would be half empty
            if "short units" in kinds:
                return "short units" if keys >= PAIR_KEYS * each else "usual"
            return "few rows" if keys >= LONG_ROW_KEYS * each else "usual"
        most = ONE_TILE[1] if "short decode" in kinds else 0
        if group > narrow.rows:
            most = FEW_KEYS[shape.granule]
        likely = short and sequences <= each and ONE_TILE[0] * sequences < keys <= most * sequences
        if likely and greatest(_segments(plans, usual)[1]) <= most:
            return "few rows"
    return "short decode" if short and group <= narrow.rows else "usual"


def batch_kind(
    plans: Sequence[Plan], usual: PlannerConfig, kinds: Collection[BatchKind]
) -> BatchKind:
    """A cheap classification of a batch; `usual` unless another of `kinds` certainly fits."""
    if usual.splits:
        return fixed_kind(plans, usual, "short units" in kinds)
    rows = sequences = pages = 0
    for plan in plans:
        if len(plan.levels) != 1:
            if "few whole" in kinds:
                return whole_kind(plans, usual)
            return shared_kind(plans, usual) if "short units" in kinds else "usual"
        rows += len(plan.positions)
        sequences += len(plan.levels[0].kv_start)
        pages += len(plan.levels[0].kv_indices)
    keys = pages * usual.page_size
    if rows == sequences:
        return decode_kind(plans, usual, kinds, keys)
    levels = [plan.levels[0] for plan in plans if len(plan.levels[0].kv_start)]
    many = max(shape.rows for shape in usual.shapes[:-1])
    fewest = min([least(level.qo_indptr[1:] - level.qo_indptr[:-1]) for level in levels])
    if fewest * usual.group_size <= many:
        return "usual"
    if "long prefill" in kinds and keys >= LONG_PREFILL * sequences:
        return "long prefill"
    longest = max([greatest(level.kv_indptr[1:] - level.kv_indptr[:-1]) for level in levels])
    return "short prefill" if longest * usual.page_size <= SHORT_PREFILL else "usual"
