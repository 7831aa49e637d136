"""Requests to pools with layer groups: shapes and windows follow the layer's group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declared import INFO

from service.errors import InvalidRequest
from service.operations.attention import DecodeFields, PrefillFields
from service.operations.rows import AppendFields
from service.operations.schema.fields import GroupAnswer
from service.operations.schema.spec import check_tensors
from service.operations.step import StepFields
from service.operations.table import BY_NAME


def group(layers: list[int], heads: int, dim: int, window: int | None, values: int = 0) -> Any:
    return GroupAnswer(
        layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=values or dim,
        page_size=16,
        dtype="fp16",
        window=window,
        kind="attention",
        page_bytes=1,
        padding=0.0,
    )


GROUPS = INFO.model_copy(
    update={
        "num_layers": 4,
        "groups": [group([0, 3], 2, 64, 24), group([1], 4, 32, None), group([2], 1, 48, None, 16)],
    }
)


class Entry:
    def __init__(self, name: str, *shape: int) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(np.float32)


def check(fields: Any, operation: str, *tensors: Entry) -> None:
    entries: Any = {one.name: one for one in tensors}
    words = fields.group_words(GROUPS)
    takes = BY_NAME[operation].takes
    check_tensors(takes, entries, fields.sizes(GROUPS), fields.is_ragged(), words)
    fields.check(entries, GROUPS)


@pytest.mark.parametrize(
    ("layer", "heads", "dims"), [(0, 2, (64, 64)), (1, 4, (32, 32)), (2, 1, (48, 16))]
)
def test_tensors_have_the_shape_of_the_layer_s_group(layer, heads, dims) -> None:
    fields = DecodeFields(sequences=["a", "b"], layer=layer)
    q = Entry("q", 2, 4, dims[0])
    kv = Entry("k", 2, heads, dims[0]), Entry("v", 2, heads, dims[1])
    check(fields, "decode", q, *kv)
    with pytest.raises(InvalidRequest) as reply:
        check(fields, "decode", q, kv[0], Entry("v", 2, heads, dims[1] + 8))
    rule = f"must be [2, {heads}, {dims[1]}] (layer group {layer})"
    assert (reply.value.field, reply.value.rule) == ("v.shape", rule)


def test_heads_of_queries_are_checked_by_the_group() -> None:
    with pytest.raises(InvalidRequest, match=r"num_kv_heads = 4 \(layer group 1\)"):
        check(DecodeFields(sequences=["a"], layer=1), "decode", Entry("q", 1, 2, 32))


def test_a_layer_that_the_pool_lacks_is_refused_as_before() -> None:
    with pytest.raises(InvalidRequest, match="num_layers = 4"):
        check(DecodeFields(sequences=["a"], layer=4), "decode", Entry("q", 1, 2, 64))


@pytest.mark.parametrize("given", [{}, {"window_left": 23}])
def test_layers_of_a_group_have_its_window(given: dict[str, int]) -> None:
    decode = DecodeFields(sequences=["a"], layer=3, **given)
    check(decode, "decode", Entry("q", 1, 2, 64))
    prefill = PrefillFields(sequences=["a"], layer=0, qo_indptr=[0, 5], causal=True, **given)
    check(prefill, "prefill", Entry("q", 5, 2, 64))
    assert (decode.window_left, prefill.window_left) == (23, 23)


@pytest.mark.parametrize("window", [-1, 0, 22, 24, 2**31 - 1])
def test_another_window_than_the_group_s_is_refused(window: int) -> None:
    fields = DecodeFields(sequences=["a"], layer=3, window_left=window)
    with pytest.raises(InvalidRequest, match="layer group 0, whose window_left is 23") as reply:
        check(fields, "decode", Entry("q", 1, 2, 64))
    assert (reply.value.field, reply.value.value) == ("window_left", window)


@pytest.mark.parametrize("given", [{}, {"window_left": 7}])
def test_layers_of_groups_without_a_window_have_the_caller_s(given: dict[str, int]) -> None:
    fields = DecodeFields(sequences=["a"], layer=1, **given)
    check(fields, "decode", Entry("q", 1, 4, 32))
    assert fields.window_left == given.get("window_left", -1)


def test_an_append_at_many_layers_is_of_one_shape() -> None:
    check(
        AppendFields(sequences=["a"], layers=[3, 0]),
        "append",
        Entry("k", 2, 1, 2, 64),
        Entry("v", 2, 1, 2, 64),
    )
    with pytest.raises(InvalidRequest, match="layer groups of several shapes"):
        check(
            AppendFields(sequences=["a"], layers=[0, 1]),
            "append",
            Entry("k", 2, 1, 2, 64),
            Entry("v", 2, 1, 2, 64),
        )


def step(**given: Any) -> StepFields:
    slot = dict.fromkeys(("q", "k", "v", "o", "lse"), 0)
    fields = StepFields.model_validate(
        {"op": "decode", "layers": [0, 1, 3], "sequences": ["a"], "slots": [slot]}
        | {"num_qo_heads": 4}
        | given
    )
    fields.check({}, GROUPS)
    return fields


def test_a_step_has_the_windows_of_the_groups() -> None:
    assert step().windows == (23, -1, 23)
    assert step(window_left=[23, 5, 23]).windows == (23, 5, 23)
    assert step(window_left=23).windows == (23, 23, 23)
    for wrong in ([23, -1, 22], -1, 24):
        with pytest.raises(InvalidRequest, match="window_left"):
            step(window_left=wrong)
    with pytest.raises(InvalidRequest, match="num_kv_heads = 4"):
        step(num_qo_heads=2)
