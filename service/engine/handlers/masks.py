"""Custom masks: from the wire's two ragged forms to bits with an offset per plan row."""

from __future__ import annotations

import numpy as np

from kernels.backend import Array, Int32, Mask
from kernels.masks import mask_row_offsets, packbits
from service.operations.schema.fields import check_mask_length


def ragged_mask(
    mask: Array, packed: bool, qo_indptr: Int32, kv_lens: Int32, order: Int32 | None
) -> Mask:
    """Mask of requests with `qo_indptr` [B+1] rows and `kv_lens` [B] keys, for plan rows.

    `mask` is a BOOL per query and key, row-major, requests back to back; or, `packed`, those as
    bits (little order), each request's segment padded to a byte. `order` is the plan's (None: the
    identity). Raises `InvalidRequest` for a mask of another length.
    """
    qo_lens = np.diff(qo_indptr)
    check_mask_length(mask.size, packed, qo_lens, kv_lens)
    bits = mask.reshape(-1).view(np.uint8) if packed else packbits(mask)
    offsets = mask_row_offsets(qo_lens, kv_lens, padded=packed)
    return Mask(bits, offsets if order is None else offsets[order])
