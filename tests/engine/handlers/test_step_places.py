"""The flags and slots of a step: each tensor may end where the arena does, and no later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernels.backend import PoolGeometry
from service.engine.handlers.steps import check_places
from service.errors import InvalidRequest
from service.operations.step import StepFields

PLACE = 4096
STORE: Any = SimpleNamespace(geometry=PoolGeometry(3, 1, 1, 2, 8))
STEP = {"layers": [0, 1, 2], "sequences": list("abcde"), "num_qo_heads": 4, "dtype": "F16"}
PLAIN = STEP | {"op": "decode"}
RAGGED = STEP | {"op": "prefill", "qo_indptr": [0, 2, 3, 4, 5, 9]}


@pytest.mark.parametrize(
    ("step", "place", "num_bytes"),
    [
        (PLAIN, "flags", 3 * 2 * 4),
        (PLAIN, "sinks", 3 * 4 * 4),
        *((PLAIN, name, 5 * 4 * 8 * 2) for name in "qo"),
        *((PLAIN, name, 5 * 2 * 8 * 2) for name in "kv"),
        (PLAIN, "lse", 5 * 4 * 4),
        (PLAIN | {"dtype": "F32"}, "q", 5 * 4 * 8 * 4),
        *((PLAIN | {"append": False}, name, 0) for name in "kv"),
        (RAGGED, "o", 9 * 4 * 8 * 2),
        (RAGGED, "mask", 2 * 2 + 3 * 1 + 4 * 4),
        (RAGGED, "packed_mask", 1 + 3 * 1 + 2),
        (STEP | {"op": "echo"}, "flags", 3 * 2 * 4),
        (STEP | {"op": "echo"}, "lse", 4),
    ],
)
def test_a_step_reaches_no_byte_outside_the_arena(
    step: dict[str, Any], place: str, num_bytes: int
) -> None:
    slots = [dict.fromkeys(("q", "k", "v", "o", "lse"), 0) for _ in range(2)]
    fields = step | {"slots": slots}
    (slots[1] if place in slots[1] else fields)[place] = PLACE
    checked = StepFields.model_validate(fields)
    check_places(STORE, checked, PLACE + num_bytes)
    with pytest.raises(InvalidRequest) as refused:
        check_places(STORE, checked, PLACE + num_bytes - 1)
    assert place in refused.value.extra["field"] or step["op"] == "echo"
    assert refused.value.extra["value"] == PLACE
