"""Attention sinks on the device: a pass over states that are complete, where sinks are given."""

from __future__ import annotations

from typing import Final

from kernels.backend import DType
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import FORMATS
from kernels.cuda.common.structs import SINK_PARAMS, params
from kernels.cuda.device.launch import Library

THREADS: Final = 256


def sinks_spec(dtype: DType) -> Spec:
    """add_sinks over o of `dtype`."""
    return spec("merge/sinks", TENSOR=FORMATS[dtype])


def enqueue_sinks(
    library: Library, dtype: DType, shape: tuple[int, ...], o: int, lse: int, sinks: int
) -> None:
    """Merge a sink into each state of `shape` (rows, heads, head_dim), on CuPy's current stream.

    o, lse, sinks: device addresses; o is of `dtype`.
    """
    rows, heads, head_dim = shape
    if rows * heads == 0:
        return
    units = -(-head_dim // 8) if head_dim % 8 == 0 else head_dim
    lanes = min(32, 1 << (units - 1).bit_length())
    block = params(
        SINK_PARAMS,
        o=o,
        lse=lse,
        sinks=sinks,
        num_states=rows * heads,
        num_heads=heads,
        head_dim=head_dim,
        lanes=lanes,
    )
    function = library.function(sinks_spec(dtype), "add_sinks")
    function((-(-rows * heads // (THREADS // lanes)),), (THREADS,), (block,))
