"""What decides the kernels and the work of a batch, besides its plans."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.backend import DType, Scoring
from kernels.cuda.kv.view import KvView


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What, besides the plans, decides the work and the kernels of a batch."""

    kv: KvView
    num_qo_heads: int
    compute: DType
    scoring: Scoring
    masked: bool

    @property
    def general(self) -> bool:
        """Whether scoring is of the general kind: see kGeneral in params.cuh."""
        scoring = self.scoring
        return self.masked or scoring.logits_soft_cap > 0 or scoring.sm_scale <= 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.kv.num_kv_heads
