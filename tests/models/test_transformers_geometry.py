"""What `attnd.transformers` says of a model to programs with a runner of their own."""

from __future__ import annotations

from typing import Any

import pytest
from attnd.transformers import geometry_of, pool_settings
from tiny_models import SIZES, tiny
from transformers import Gemma2Config, Gemma2ForCausalLM

pytestmark = pytest.mark.long


def test_a_pool_for_a_number_of_tokens() -> None:
    settings = pool_settings(tiny(), tokens=100)
    assert (settings["pool.page-size"], settings["pool.num-pages"]) == (16, 7)
    assert "pool.num-pages" not in pool_settings(tiny())


def test_the_scoring_of_a_model_is_what_its_layers_ask_for() -> None:
    windows: dict[str, Any] = {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = Gemma2Config(**SIZES, **windows, query_pre_attn_scalar=32)
    geometry = geometry_of(Gemma2ForCausalLM(config))
    scoring = {"sm_scale": 32**-0.5, "logits_soft_cap": 50.0, "window_left": (7, -1)}
    assert geometry.scoring == scoring and geometry.num_qo_heads == 6
    geometry.check_layer({"scaling": 32**-0.5, "softcap": 50.0, "dropout": 0.0})
    for other in ({"scaling": 64**-0.5, "softcap": 50.0}, {"scaling": 32**-0.5}):
        with pytest.raises(ValueError, match="cannot serve this model in one step"):
            geometry.check_layer(other)
    llama = geometry_of(tiny())
    llama.check_layer({"scaling": llama.head_dim**-0.5})
