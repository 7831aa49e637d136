"""Salts of models: other weights, adapters or settings of these have another one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attnd.transformers import salt_of
from attnd.transformers.salt import WORDS, device_sums
from tiny_models import tiny
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = pytest.mark.long


class Adapted(torch.nn.Module):
    """A linear layer with low-rank adapters by name, one of them active, or none."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.active, self.scaling = base, ["a"], {"a": 1.0, "b": 1.0}
        self.rows = torch.nn.ParameterDict(
            {name: torch.zeros(2, base.in_features) for name in "ab"}
        )
        self.scale = torch.ones(3)  # neither a parameter nor a buffer
        self.register_buffer("mask", torch.ones(70), persistent=False)
        self.packed = torch.nn.Parameter(torch.zeros(4))
        self.packed.quant_state = SimpleNamespace(absmax=torch.ones(2), nested=None)
        self.wrapped = TwoTensor(torch.zeros(2), torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out


def adapted() -> Any:
    model = tiny()
    layer = model.model.layers[1].self_attn
    layer.q_proj = Adapted(layer.q_proj)
    return model


def adapter(model: Any) -> Adapted:
    found: Adapted = model.model.layers[1].self_attn.q_proj
    return found


def add(at: Callable[[Any], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            at(model).add_(1e-3)

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the last row of the embeddings": add(lambda m: m.model.embed_tokens.weight[-1]),
    "a row of k_proj": add(lambda m: m.model.layers[0].self_attn.k_proj.weight[5]),
    "the end of a bias-like vector": add(lambda m: m.model.norm.weight[-1:]),
    "one adapter's weights": add(lambda m: adapter(m).rows["b"][1]),
    "a buffer that is not saved": add(lambda m: adapter(m).mask[69:]),
    "a tensor that is no parameter": add(lambda m: adapter(m).scale[2:]),
    "scales of quantized weights": add(lambda m: adapter(m).packed.quant_state.absmax[1:]),
    "a part of a wrapped tensor": add(lambda m: adapter(m).wrapped.b[1:]),
    "the active adapter": lambda m: setattr(adapter(m), "active", ["b"]),
    "adapters off": lambda m: setattr(adapter(m), "active", []),
    "an adapter's scale": lambda m: adapter(m).scaling.update(a=2.0),
    "a setting": lambda m: m.config.rope_parameters.update(rope_theta=5.0),
    "its type": lambda m: m.to(torch.bfloat16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_has_another_salt(name: str) -> None:
    model = adapted()
    salt = salt_of(model)
    CHANGES[name](model)
    assert salt_of(model) != salt


def test_equal_models_have_one_salt_whatever_they_did_and_wherever_they_lie() -> None:
    model = adapted()
    salt = salt_of(model)
    other = adapted()
    other.config._name_or_path = other.name_or_path = "/elsewhere"
    other.set_attn_implementation("eager")
    other.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    adapter(other).scaling = {"b": 1.0, "a": 1.0}
    weight = other.lm_head.weight
    other.lm_head.weight = torch.nn.Parameter(weight.detach().t().contiguous().t())
    assert salt_of(other) == salt


def test_a_model_without_its_weights_has_no_salt() -> None:
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta .* give a salt"):
        salt_of(model)


def test_sums_on_a_device_differ_for_every_small_change() -> None:
    """They are computed with torch alone, so on the CPU as on a GPU."""
    data = torch.arange(4 * WORDS + 7, dtype=torch.int64).to(torch.uint8)
    sums = {device_sums(data)}
    for places in ([0], [4 * WORDS + 6], [3, 7], [3, 4 * WORDS - 1], [4 * WORDS, 2]):
        other = data.clone()
        other[places] ^= 128  # the sign of a number: the upper bit of a word
        sums.add(device_sums(other))
    swapped = data.clone()
    swapped[:4], swapped[4:8] = data[4:8], data[:4]
    sums.add(device_sums(swapped))
    assert len(sums) == 7
    assert device_sums(data[:0]) == device_sums(data[:0].clone())
    assert device_sums(data[1:6]) == device_sums(data[1:6].clone()), "wherever it begins"
