"""Custom masks: from the wire's two ragged forms to bits with an offset per plan row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.backend import Int32, Mask
from kernels.masks import mask_row_offsets, packbits
from service.core.errors import InvalidRequest


def ragged_mask(
    mask: NDArray[Any], packed: bool, qo_indptr: Int32, kv_lens: Int32, order: Int32 | None
) -> Mask:
    """Mask of requests with `qo_indptr` [B+1] rows and `kv_lens` [B] keys, for plan rows.

    `mask` is a BOOL per query and key, row-major, requests back to back; or, `packed`, those as
    bits (little order), each request's segment padded to a byte. `order` is the plan's (None: the
    identity). Raises `InvalidRequest` when its length is not what the lengths ask for.
    """
    qo_lens = np.diff(qo_indptr).astype(np.int64)
    areas = qo_lens * kv_lens
    check_size(mask, packed, int(((areas + 7) // 8 if packed else areas).sum()))
    bits = mask.reshape(-1).view(np.uint8) if packed else packbits(mask)
    offsets = mask_row_offsets(qo_lens, kv_lens, padded=packed)
    return Mask(bits, offsets if order is None else offsets[order])


def check_size(mask: NDArray[Any], packed: bool, needed: int) -> None:
    """Raises `InvalidRequest` with both lengths."""
    if mask.size == needed:
        return
    if packed:
        rule = f"needs {needed} bytes: qo_len x kv_len bits per sequence, padded to a byte each"
        raise InvalidRequest("packed_mask", f"{mask.size} bytes", rule)
    rule = f"needs {needed} elements: qo_len x kv_len per sequence"
    raise InvalidRequest("mask", f"{mask.size} elements", rule)
