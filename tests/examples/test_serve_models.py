"""The engine of examples/serve with other decoders: sinks, windows, soft caps, other scales."""

from __future__ import annotations

import threading
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
from examples.serve.answers import Delta, Sampling
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler

pytestmark = pytest.mark.long

COUNT: Final = 24
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
WINDOW: Final[dict[str, Any]] = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


class NoText:
    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


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
    expected = [
        model.generate(
            torch.tensor([one]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        ).tolist()[0]
        for one in prompts
    ]
    settings = pool_settings(model) | {"pool.num-pages": 60, "server.port": free_port()}
    with serve_tcp(settings):
        port = int(str(settings["server.port"]))
        runner = Runner(model, lambda: TorchSession(port=port), 4, 4 + 64)
        scheduler = Scheduler(runner, NoText(), set())
        scheduler.start()
        try:
            for cached in (0, 64):
                requests = [answered(scheduler, one) for one in prompts]
                assert [request.answers[0].tokens for request in requests] == expected
                assert requests[0].cached_tokens == cached
        finally:
            scheduler.close()


def answered(scheduler: Scheduler, prompt: list[int]) -> Any:
    over, errors = threading.Event(), list[str]()

    def emit(delta: Delta) -> None:
        if delta.error is not None:
            errors.append(delta.error)
        if delta.finish or delta.error:
            over.set()

    request = scheduler.submit(prompt, Sampling(COUNT, temperature=0), 1, emit)
    assert over.wait(60) and not errors
    return request
