"""The engine of examples/serve with other decoders: sinks, windows, soft caps, other scales."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from attnd.torch import TorchSession
from attnd.transformers import pool_settings
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bench.driver.servers import free_port
from examples.local_service import serve_tcp
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler
from tests.examples.tiny_decoders import SIZES, NoText, ask, greedy

pytestmark = pytest.mark.long

COUNT: Final = 24
WINDOW: Final[dict[str, Any]] = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def gpt_oss() -> Any:
    """Its sinks are as large as the logits, so an answer without them is another one."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **WINDOW, **experts))
    for name, values in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(values, std=3.0)
    return model


def gemma2() -> Any:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **WINDOW, query_pre_attn_scalar=64))


@pytest.mark.parametrize("build", [qwen2, gpt_oss, gemma2])
def test_answers_of_other_decoders_equal_generate(build: Any) -> None:
    torch.manual_seed(7)
    model = build().eval()
    model.set_attn_implementation("eager")
    prompts = [[7 + number, *range(1, 70 + 9 * number)] for number in range(3)]
    expected = [greedy(model, one, COUNT) for one in prompts]
    settings = pool_settings(model) | {"pool.num-pages": 60, "server.port": free_port()}
    with serve_tcp(settings):
        port = int(str(settings["server.port"]))
        runner = Runner(model, lambda: TorchSession(port=port), 4, 4 + 64)
        scheduler = Scheduler(runner, NoText(), set())
        scheduler.start()
        try:
            for cached in (0, 64):
                asked = [ask(scheduler, one, COUNT) for one in prompts]
                assert [one.tokens() for one in asked] == expected
                assert asked[0].request.cached_tokens == cached
        finally:
            scheduler.close()
