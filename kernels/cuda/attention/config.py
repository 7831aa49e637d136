"""What decides the kernels and the work of a batch, besides its plans."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kernels.backend import DType, Scoring
from kernels.cuda.common.structs import ATTEND_PARAMS, packed
from kernels.cuda.kv.view import KvView

LOG2E: Final = 1 / np.log(2)
FP16_TOP: Final = 15.0
"""`kFp16Top` of state.cuh."""
MOST_HEADROOM: Final = 3e38
"""Of float32."""


class AttentionShape(NamedTuple):
    """What of a configuration decides its kernels: all but where K and V are, and how many."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool
    dtype: DType
    page_size: int
    page_bytes: int
    contiguous: bool
    num_qo_heads: int
    compute: DType
    scoring: Scoring
    masked: bool

    @property
    def dims(self) -> tuple[int, int]:
        """Of a head's K and V."""
        return self.head_dim, self.v_head_dim

    @property
    def general(self) -> bool:
        """Whether scoring is of the general kind: see kGeneral in params.cuh."""
        scoring = self.scoring
        return self.masked or scoring.logits_soft_cap > 0 or scoring.sm_scale <= 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


class AttentionConfig(NamedTuple):
    """What, besides the plans, decides the work and the kernels of a batch: a key of caches."""

    kv: KvView
    num_qo_heads: int
    compute: DType
    scoring: Scoring
    masked: bool

    @property
    def shape(self) -> AttentionShape:
        kv = self.kv
        return AttentionShape(
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            v_head_dim=kv.v_head_dim,
            latent=kv.latent,
            dtype=kv.dtype,
            page_size=kv.page_size,
            page_bytes=kv.page_bytes,
            contiguous=kv.contiguous,
            num_qo_heads=self.num_qo_heads,
            compute=self.compute,
            scoring=self.scoring,
            masked=self.masked,
        )

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.kv.num_kv_heads


def attend_struct(config: AttentionConfig) -> bytes:
    """`AttendParams` as far as the config decides it."""
    kv, scoring = config.kv, config.scoring
    scale = scoring.sm_scale * kv.k_scale
    unit = 1.0 if config.shape.general else max(scale * LOG2E, FP16_TOP / MOST_HEADROOM)
    return packed(
        ATTEND_PARAMS,
        **kv.strides,
        group_size=config.group_size,
        scale=scale,
        scale2=scale * LOG2E,
        headroom=0.0 if config.compute == "bf16" else FP16_TOP / unit,
        soft_cap=scoring.logits_soft_cap,
        v_scale=kv.v_scale,
        window_left=scoring.window_left,
    )
