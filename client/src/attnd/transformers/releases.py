"""Names that differ between the supported releases of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE: Final = next(
    field.name
    for field in fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""Models and `generate` take a cache by this name: `cache` since 5.24."""
