"""Rope whose frequencies depend on the length of what a forward computes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import wraps
from typing import Any, Final

from attnd.transformers.batch import Batch
from attnd.transformers.releases import CACHE

LIMIT: Final = "original_max_position_embeddings"


def rope_tokens_of(model: Any, config: Any) -> int | None:
    """Length up to which the frequencies of LongRoPE stay the same; None: any length.

    Where a sequence of a forward is longer, the forward rotates all its new tokens with other
    frequencies, those of shorter sequences too. Raises ValueError for dynamic NTK, whose
    frequencies depend on every length that the model has seen.
    """
    kinds = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, Mapping) else {kind}
    if "dynamic" in kinds:
        raise ValueError(
            f"rope_type of {type(model).__name__} is 'dynamic': its K depends on the lengths that "
            "the model has seen before, so attnd can neither keep nor share it; use another "
            "rope_type (yarn, say) or another attn_implementation for this model"
        )
    if "longrope" not in kinds:
        return None
    given = config.rope_parameters
    ropes = [given, *(one for one in given.values() if isinstance(one, Mapping))]
    return min(int(one[LIMIT]) for one in ropes if LIMIT in one)


KEPT: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def keep_cache(model: Any) -> None:
    """Have `generate` go on with a cache that the model drops because its frequencies change.

    The model then computes all tokens again, so the cache is emptied.
    """
    if model in KEPT:
        return
    KEPT.add(model)
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def run(*args: Any, **options: Any) -> Any:
        inputs = prepare(*args, **options)
        batch = getattr(options.get(CACHE), "batch", None)
        if isinstance(batch, Batch) and inputs.get(CACHE) is None:
            batch.clear()
            inputs[CACHE] = options[CACHE]
        return inputs

    model.prepare_inputs_for_generation = run
