"""Which specialisations merges have, and how each is launched."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from kernels.backend import DType, Unsupported
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import FORMATS

ONCE: Final = 10
"""Partial states that are loaded at once where no list is longer: more would leave few warps."""
PARTIAL_BATCHES: Final = (2, 4, ONCE)
IN_ORDER: Final = 16
"""The same of longer lists in order, whose members no other lanes share."""
BATCHES: Final = (2, 4)
"""`BATCH` of merge.cu, of the kernels' partial states and of others."""


class MergeLaunch(NamedTuple):
    """How to launch a merge of `units` lists: kernel, block, grid and shares per list."""

    spec: Spec
    threads: int
    grid: int
    split: int


def merge_launch(
    head_dim: int,
    partials: bool,
    dtype: DType,
    units: int,
    longest: int,
    multiprocessors: int,
    in_order: bool = False,
) -> MergeLaunch:
    """Lists of any length are shared by groups of lanes while these are no more than fit at once.

    `in_order`: they are not, and members come one after another.

    Raises Unsupported when there are more lists than a launch can number.
    """
    if units >= 2**31:
        raise Unsupported("lists", units, "at most 2^31 rows times heads in one merge")
    batch = 2 if longest <= 2 else ONCE if partials and 4 < longest <= ONCE else 4
    if in_order and partials and longest > ONCE:
        batch = IN_ORDER
    kernel, lanes = _kernel(head_dim, partials, dtype, batch, in_order)
    few = units * lanes < 2**14 and longest >= 32 and head_dim <= 256
    threads = (512 if head_dim > 192 else 1024) if few and batch == 4 else 256
    groups, split = threads // lanes, 1
    most = 0 if in_order else 512 * multiprocessors // lanes
    while batch == 4 and split < groups and longest >= 8 * split and units * split < most:
        split *= 2
    grid = -(-units * split // groups)
    return MergeLaunch(kernel, threads, grid, split)


@cache
def _kernel(
    head_dim: int, partials: bool, dtype: DType, batch: int, in_order: bool
) -> tuple[Spec, int]:
    """The specialisation, and how many lanes share a list."""
    vector = 1 if head_dim == 0 else 4 if partials or dtype == "fp32" else 8
    if batch == 2 and head_dim:
        vector *= 2  # kUnits of merge.cu
    lanes = min(32, 1 << (max(1, -(-head_dim // vector)) - 1).bit_length()) if head_dim else 32
    return merge_spec(head_dim, partials, dtype, batch, in_order), lanes


def merge_spec(
    head_dim: int, partials: bool, dtype: DType, batch: int, in_order: bool = False
) -> Spec:
    """merge_states of float partials into `dtype`, or of `dtype` into itself; head_dim 0: any."""
    return spec(
        "merge/merge",
        BATCH=batch,
        HEAD_DIM=head_dim,
        PARTIALS=int(partials),
        TENSOR_IN=FORMATS["fp32" if partials else dtype],
        TENSOR_OUT=FORMATS[dtype],
        **({"IN_ORDER": 1} if in_order else {}),
    )
