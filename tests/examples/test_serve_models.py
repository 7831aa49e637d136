"""The engine of examples/serve with other decoders: sinks, windows, soft caps, other scales."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch
from attnd.torch import EmbeddedSession, Placement, TorchSession
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
from tests.examples.tiny_decoders import SIZES, NoText, ask, greedy, llama

pytestmark = pytest.mark.long

COUNT: Final = 24
WINDOW: Final[dict[str, Any]] = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Lora(torch.nn.Module):
    """A linear layer and a low-rank adapter."""

    def __init__(self, base: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.is_on = base, True
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out + x @ self.down.T @ self.up.T if self.is_on else out


def with_lora(seed: int) -> Any:
    model = llama(11)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj, seed)
    model.set_attn_implementation("eager")
    return model


def switch(model: Any, *, is_on: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.is_on = is_on


def train(model: Any) -> None:
    """Training that reaches a few rows."""
    with torch.no_grad():
        model.model.embed_tokens.weight[40:48] *= -1.0


def test_adapters_and_changed_weights_find_no_kv_of_the_model_as_it_was() -> None:
    """Two runners of one model with two adapters, and one that changes, share a service."""
    prompt = list(range(1, 90))
    models = [with_lora(1), with_lora(2)]
    settings = pool_settings(models[0]) | {"pool.num-pages": 60, "server.port": free_port()}
    changes = (lambda: train(models[1]), lambda: switch(models[1], is_on=False))
    with serve_tcp(settings), ExitStack() as stack:
        port = int(str(settings["server.port"]))
        expected = [greedy(one, prompt, COUNT) for one in models]
        for change in changes:  # what the second model says after each of them
            change()
            expected.append(greedy(models[1], prompt, COUNT))
        switch(models[1], is_on=True)
        train(models[1])  # undoes itself
        schedulers = []
        for model in models:
            runner = Runner(model, lambda: TorchSession(port=port), 4, 4 + 64)
            schedulers.append(Scheduler(runner, NoText(), set()))
            schedulers[-1].start()
            stack.callback(schedulers[-1].close)

        def check(scheduler: Scheduler, tokens: list[int]) -> None:
            for cached in (0, 80):
                asked = ask(scheduler, prompt, COUNT)
                assert (asked.tokens(), asked.request.cached_tokens) == (tokens, cached)

        assert len(set(map(tuple, expected))) == 4, "each model says something else"
        for scheduler, tokens in zip(schedulers, expected, strict=False):
            check(scheduler, tokens)
        for change, tokens in zip(changes, expected[2:], strict=True):
            schedulers[1].change(change).result(60)
            check(schedulers[1], tokens)


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


def test_a_runner_with_its_engine_in_this_process_answers_as_generate_without_graphs() -> None:
    torch.manual_seed(7)
    model, prompt = qwen2().eval(), [7, *range(1, 70)]
    model.set_attn_implementation("eager")
    expected = greedy(model, prompt, COUNT)
    settings = pool_settings(model) | {"pool.num-pages": 60, "backend.kind": "cpu"}
    runner = Runner(model, lambda: EmbeddedSession(settings), 4, 4 + 64)
    scheduler = Scheduler(runner, NoText(), set())
    scheduler.start()
    try:
        assert ask(scheduler, prompt, COUNT).tokens() == expected
    finally:
        scheduler.close()


def test_forwards_beside_an_engine_of_this_process_must_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they cannot be, the runner ends at once: a first launch in a step might not return."""

    def fails(_: Runner) -> None:
        raise RuntimeError("no graph")

    model, sessions = qwen2().eval(), []
    settings = pool_settings(model) | {"pool.num-pages": 60, "backend.kind": "cpu"}

    def connect() -> EmbeddedSession:
        sessions.append(session := EmbeddedSession(settings))
        session.placement = Placement("same_process", 1.0)
        return session

    monkeypatch.setattr(Runner, "_record", fails)
    with pytest.raises(RuntimeError, match=r"not recorded \(no graph\), .* name it by --attnd"):
        Runner(model, connect, 4, 4 + 64)
    with pytest.raises(RuntimeError, match="closed"):
        sessions[0].info()
