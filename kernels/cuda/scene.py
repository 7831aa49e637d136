"""What a batch attends over and how it scores: everything but the plans that decides its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels.backend import DType, Scoring
from kernels.cuda.tensor_maps import TensorMaps


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Where K and V are: device addresses, strides in rows of head_dim elements, dtype, scales.

    `layer_bytes` separates layers; `contiguous` means that a page id is its own index. `maps` makes
    Hopper's tensor maps of one layer, or of all for None, for a kernel that takes so many keys at a
    time: it waits for as many as one box of a map brings.
    """

    k: int
    v: int
    layer_bytes: int
    layer_rows: int
    page_rows: int
    token_rows: int
    head_rows: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    k_scale: float
    v_scale: float
    num_pages: int
    contiguous: bool
    maps: Callable[[int | None, int], TensorMaps]

    @property
    def strides(self) -> dict[str, int]:
        """What finds the row of a token, by the names that all kernels' structs have for it."""
        return {
            "layer_rows": self.layer_rows,
            "page_rows": self.page_rows,
            "token_rows": self.token_rows,
            "head_rows": self.head_rows,
            "page_size": self.page_size,
            "num_kv_heads": self.num_kv_heads,
        }


@dataclass(frozen=True, slots=True)
class Scene:
    """What, besides the plans, decides the work and the kernels of a batch."""

    store: Store
    num_qo_heads: int
    compute: DType
    scoring: Scoring
    masked: bool

    @property
    def rare(self) -> bool:
        """Whether the common kernels do not do: see kRare in shape.cuh."""
        scoring = self.scoring
        return self.masked or scoring.logits_soft_cap > 0 or scoring.sm_scale <= 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.store.num_kv_heads
