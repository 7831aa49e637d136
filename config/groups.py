"""Settings of groups of layers, for models whose layers differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from config.section import Section

MAX_GROUPS: Final = 8
MAX_LAYERS: Final = 4096
OF_KIND: Final = {
    "attention": ("num_kv_heads", "head_dim"),
    "latent": ("latent_dim", "rope_dim"),
}
"""The settings that a group of each kind has, and of which no other kind has any."""


class GroupSettings(Section):
    """A group of layers with one shape of K and V, whose tokens share pages."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...], Field(min_length=1)]
    """Numbers of the model's layers."""

    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of KV heads."""

    head_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Dimension of the heads of q and k."""

    v_head_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Dimension of the heads of v and o; absent: head_dim."""

    window: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Keys that a query sees, its own among them; absent: all. Pages that no later token can see
    return to the pool."""

    kind: Literal["attention", "latent"] = "attention"
    """Kind of attention; `latent` (MLA) has one row of latent_dim + rope_dim values per token."""

    latent_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Values of a latent row that are K and V."""

    rope_dim: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Values of a latent row, after the others, that are K only."""

    dtype: Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Storage type; absent: pool.dtype."""

    @model_validator(mode="after")
    def check_kind(self) -> GroupSettings:
        for kind, names in OF_KIND.items():
            for name in names:
                if (getattr(self, name) is None) == (kind == self.kind):
                    rule = "must be given" if kind == self.kind else "must be left out"
                    raise ValueError(f"{name}: {rule} in a group of kind {self.kind}")
        if self.kind == "latent" and self.v_head_dim is not None:
            raise ValueError("v_head_dim: must be left out in a group of kind latent")
        return self


def check_groups(groups: Sequence[GroupSettings]) -> None:
    """Check that every layer up to the last is in one group, and that one has no window.

    Raises ValueError.
    """
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        for layer in group.layers:
            if layer in group_of:
                rule = f"layer {layer} is in group {group_of[layer]} too: put it in one"
                raise ValueError(f"pool.groups.{number}.layers: {rule}")
            group_of[layer] = number
    missing = next((layer for layer in range(max(group_of)) if layer not in group_of), None)
    if missing is not None:
        raise ValueError(f"pool.groups: layer {missing} is in no group: put it in one")
    if all(group.window is not None for group in groups):
        rule = "one group must have no window: it keeps the names of all pages"
        raise ValueError(f"pool.groups: {rule}: give a group none, and calls a window_left")
