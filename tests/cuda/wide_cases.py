"""Batches for the wide kernel alone: shapes, plans, work items and masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kernels.backend import Level, Plan
from kernels.cuda.plan.planner import BatchWork, make_work
from kernels.cuda.plan.tiles import PlannerConfig, TileShape
from kernels.cuda.wide import variants as wide

SMS: Final = 132
DOCUMENTS: Final = 8
"""Blocks of a mask of documents."""


@dataclass(frozen=True, slots=True)
class Case:
    """One batch.

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
    mask: str = ""  # how a custom mask looks, see `mask_of`; "": there is none
    ragged: bool = False
    workers: int = SMS
    lengths: str = ""  # "short", "long": the kernel of such batches; "": the usual one
    granule: int = 128
    shuffled_rows: bool = False

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        return sum(self.qo_lens)


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


def make_items(case: Case, plan: Plan) -> BatchWork:
    shape = TileShape(
        "wide", case_variant(case).tile_rows, 2**30, case.workers, case.granule, False, case.granule
    )
    size = 1 if case.ragged else case.page_size
    return make_work(
        [(0, plan)], PlannerConfig(case.group, size, case.num_kv_heads, case.window, (shape,))
    )


def mask_of(case: Case, keys: int, rng: np.random.Generator) -> Any:
    """bool [rows, keys], True = visible. In all but "causal" and "documents" row 1 sees nothing.

    random: half of all pairs; documents: as many equal blocks on the diagonal; causal: the pairs
    that the causal rule leaves; islands: a few squares, whole tiles and whole rows hidden between
    them; corners: one pair in each 128 rows by 512 keys, the last row and the last key of a tile;
    hidden: nothing at all.
    """
    rows, own = np.arange(case.rows)[:, None], positions(case)[:, None]
    key = np.arange(keys)[None]
    if case.mask == "random":
        seen = rng.random((case.rows, keys)) < 0.5
    elif case.mask == "documents":
        seen = (own * DOCUMENTS // keys) == (key * DOCUMENTS // keys)
    elif case.mask == "causal":
        seen = key <= own
    elif case.mask == "islands":
        seen = ((rows // 24) * 7 + (key // 40) * 3) % 11 == 0
    elif case.mask == "corners":
        seen = (rows % 32 == 31) & (key % 512 == 127 + 128 * (rows // 32 % 4))
    else:
        seen = np.zeros((case.rows, keys), bool)
    if case.mask not in ("causal", "documents") and case.rows > 1:
        seen[1] = False
    return seen


def case_variant(case: Case) -> wide.WideVariant:
    page = 0 if case.ragged else case.page_size
    usual = wide.variant(
        case.head_dim,
        case.dtype,  # type: ignore[arg-type]
        page,
        bool(case.mask),
        case.soft_cap > 0,
    )
    others = {"short": wide.short_variant(usual), "long": wide.long_variant(usual)}
    made = others.get(case.lengths, usual)
    if made is None:
        raise ValueError(f"{case} has no kernel for {case.lengths} batches")
    return made


# --- checked ------------------------------------------------------------------------------------


def grid(**fixed: Any) -> Iterator[Case]:
    """Short and long, ragged and aligned query and key counts, in one batch and alone."""
    for qo, kv in (((1,), (54,)), ((37, 1, 128), (97, 16, 512)), ((577, 17), (2048, 17))):
        for causal in (True, False):
            yield Case(f"{qo}x{kv}", qo, kv, causal=causal, **fixed)
    yield Case("kv<qo", (127, 40), (54, 1), **fixed)
    yield Case("split", (200,), (2048,), causal=True, workers=512, **fixed)


def groups() -> dict[str, list[Case]]:
    one = {"num_qo_heads": 1, "num_kv_heads": 1}
    long = {"num_qo_heads": 4, "num_kv_heads": 1, "workers": 1}  # runs of more than 32 key tiles
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
            *grid(head_dim=64, page_size=8, layout="HND", dtype="bf16"),
            *grid(head_dim=64, page_size=64),
            *grid(head_dim=64, soft_cap=5.0),
            *grid(num_qo_heads=7, num_kv_heads=1),
        ],
        "short": [
            *grid(lengths="short"),
            *grid(lengths="short", ragged=True, dtype="bf16", shuffled_rows=True),
            *grid(lengths="short", page_size=64, layout="HND", window=33),
            *grid(lengths="short", page_size=8, num_qo_heads=7, num_kv_heads=1),
        ],
        "long": [
            *grid(lengths="long", head_dim=64),
            *grid(lengths="long", head_dim=64, ragged=True, dtype="bf16", shuffled_rows=True),
            *grid(lengths="long", head_dim=64, page_size=32, layout="HND", window=200),
            *grid(lengths="long", head_dim=64, num_qo_heads=7, num_kv_heads=1),
        ],
        "general": [
            *grid(window=33),
            *grid(window=200, page_size=64),
            *grid(soft_cap=5.0),
            *grid(mask="random"),
            *grid(mask="random", window=100, soft_cap=30.0, layout="HND"),
            *grid(mask="random", ragged=True),
        ],
        "skipped": [
            *grid(mask="islands"),
            *grid(mask="corners", ragged=True),
            *grid(mask="documents", head_dim=64, page_size=32),
            *grid(mask="islands", page_size=8),
            *grid(mask="islands", head_dim=256, window=150),
            *grid(mask="causal", head_dim=192),
            *grid(mask="hidden"),
            Case("long", (1200, 7), (9000, 5000), mask="islands", causal=False, **long),
            Case("long, corners", (1200, 7), (9000, 5000), mask="corners", **long),
            Case("long, hidden", (1200,), (9000,), mask="hidden", causal=False, **long),
            Case("long, cut", (300, 7), (9000, 5000), mask="islands", workers=512, **one),
        ],
        "sanitized": [
            Case("partial tile", (100,), (300,), **one),
            Case("split", (40, 3), (700, 20), num_qo_heads=2, num_kv_heads=1, workers=64),
        ],
        "cascade": [
            Case("two levels", (1,) * 40, (50,) * 40, shared=1000, shuffled_rows=True),
            Case("uneven", (3, 1, 20), (5, 100, 333), shared=4096, workers=1024),
            Case("window", (3, 1, 20), (5, 100, 333), shared=1000, window=150),
            Case("mask", (30, 1, 20), (50, 100, 333), shared=1000, mask="random"),
            Case("islands", (30, 1, 90), (50, 100, 333), shared=4000, mask="islands"),
        ],
    }
