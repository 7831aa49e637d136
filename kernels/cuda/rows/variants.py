"""Which specialisations the copies of rows have."""

from __future__ import annotations

from kernels.backend import DType
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import FORMATS


def rows_spec(head_dim: int, tensor: DType, storage: DType) -> Spec:
    """append_rows, gather_rows and copy_rows between one tensor format and one pool format."""
    return spec("rows/rows", HEAD_DIM=head_dim, TENSOR=FORMATS[tensor], STORE=FORMATS[storage])


def stored_width(head_dim: int, storage: DType) -> int:
    """A head's row as it is stored, counted in 16-bit values."""
    return head_dim // 2 if storage.startswith("fp8") else head_dim


def stored_spec(head_dim: int, storage: DType) -> Spec:
    """append_rows and gather_rows that move rows as they are stored: 16 bits at a time."""
    width = stored_width(head_dim, storage)
    moved: DType = storage if width == head_dim else "fp16"
    return rows_spec(width, moved, moved)
