"""Which specialisations the copies of rows have."""

from __future__ import annotations

from kernels.backend import DType
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import FORMATS


def rows_spec(head_dim: int, tensor: DType, storage: DType, v_head_dim: int | None = None) -> Spec:
    """append_rows, gather_rows and copy_rows between one tensor format and one pool format.

    `v_head_dim` None: as `head_dim`; 0: rows have no V.
    """
    others = {} if v_head_dim in (None, head_dim) else {"VALUE_DIM": v_head_dim or 0}
    formats = {"TENSOR": FORMATS[tensor], "STORE": FORMATS[storage]}
    return spec("rows/rows", HEAD_DIM=head_dim, **formats, **others)


def stored_width(head_dim: int, storage: DType) -> int:
    """A head's row as it is stored, counted in 16-bit values."""
    return head_dim // 2 if storage.startswith("fp8") else head_dim


def stored_spec(head_dim: int, storage: DType, v_head_dim: int | None = None) -> Spec:
    """append_rows and gather_rows that move rows as they are stored: 16 bits at a time."""
    width = stored_width(head_dim, storage)
    values = None if v_head_dim is None else stored_width(v_head_dim, storage)
    moved: DType = storage if width == head_dim else "fp16"
    return rows_spec(width, moved, moved, values)
