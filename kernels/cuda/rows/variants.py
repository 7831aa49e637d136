"""Which specialisations the copies of rows have."""

from __future__ import annotations

from kernels.backend import DType
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import FORMATS


def rows_spec(head_dim: int, tensor: DType, storage: DType) -> Spec:
    """append_rows, gather_rows and copy_rows between one tensor format and one pool format."""
    return spec("rows/rows", HEAD_DIM=head_dim, TENSOR=FORMATS[tensor], STORE=FORMATS[storage])
