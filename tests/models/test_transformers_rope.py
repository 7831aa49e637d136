"""Rope whose frequencies change with the length: the tokens of eager attention, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attnd import Session
from attnd.torch import TorchSession
from attnd.transformers import AttndCache, geometry_of, pool_settings
from tiny_models import (
    HEAD_DIM,
    KV_HEADS,
    SIZES,
    Prompts,
    assert_same,
    generated,
    prompts,
    random_tokens,
    seeded,
    tiny,
)
from transformers import (
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from examples.serve import launch

pytestmark = pytest.mark.long

NUM_PAGES = 24
SHORT = 32
"""Tokens up to which the short frequencies hold."""
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [1.0 + i / 2 for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": SHORT,
}


def phi3() -> Any:
    """It drops the cache where its frequencies change, and computes all tokens again."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    sizes |= {"hidden_size": 3 * KV_HEADS * HEAD_DIM, "initializer_range": 0.2}
    rope = {"rope_parameters": dict(ROPE), "original_max_position_embeddings": SHORT}
    return Phi3ForCausalLM(Phi3Config(**sizes, **rope))


def llama(**rope: Any) -> Any:
    """It goes on with the K that it has."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope or dict(ROPE)))


@pytest.mark.parametrize("make", [phi3, llama])
@pytest.mark.parametrize(
    ("lengths", "prefix"),
    [((5, 40), 0), ((28, 5), 0), ((5, 6), 36), ((5, 9), 20)],
    ids=["beyond", "across", "beyond, prefix shared", "across, prefix shared"],
)
def test_beyond_the_original_length_tokens_are_those_of_eager_attention(
    session: Session, make: Any, lengths: tuple[int, ...], prefix: int
) -> None:
    model, batch = seeded(make), prompts(*lengths, prefix=prefix)
    wanted = generated(model, batch)
    with AttndCache(session, model) as cache:
        if prefix:  # K of short and long prompts differ, also in their common beginning
            saved = cache.share_prefix(model, batch.ids, batch.mask)
            assert saved == (prefix if prefix + max(lengths) <= SHORT else 0)
        assert_same(generated(model, batch, cache), wanted)
        if make is llama:  # it would mix frequencies otherwise than a new cache does
            return
        turn = torch.tensor([random_tokens(4, row) for row in range(len(lengths))])
        ids = torch.cat([wanted.sequences, turn], dim=1)
        more = torch.ones(len(ids), ids.shape[1] - batch.mask.shape[1], dtype=torch.long)
        second = Prompts(ids, torch.cat([batch.mask, more], dim=1))
        assert_same(generated(model, second, cache), generated(model, second))


def test_beams_and_rejected_tokens_cross_the_original_length(session: Session) -> None:
    model = seeded(phi3)
    for batch, options in (
        (prompts(27, 20), {"num_beams": 3}),
        (prompts(27), {"prompt_lookup_num_tokens": 4}),
    ):
        options |= {"output_logits": False}
        wanted = generated(model, batch, **options)
        with AttndCache(session, model) as cache:
            got = generated(model, batch, cache, **options)
        assert got.sequences.tolist() == wanted.sequences.tolist()


def test_replayed_decodes_cross_the_original_length(torch_session: TorchSession) -> None:
    model, batch = seeded(phi3), prompts(28, 5)
    with AttndCache(torch_session, model) as cache, cache.graphs(model) as decodes:
        assert_same(generated(model, batch, cache), generated(model, batch))
        assert decodes.replayed == 7  # of nine; one warms up, one computes all tokens again


def test_rope_whose_frequencies_depend_on_what_came_before_is_refused(session: Session) -> None:
    model = seeded(lambda: llama(rope_type="dynamic", factor=4.0, rope_theta=10000.0))
    for refused in (lambda: AttndCache(session, model), lambda: pool_settings(model)):
        with pytest.raises(ValueError, match="rope_type of LlamaForCausalLM is 'dynamic'"):
            refused()


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4.0}, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, None),
        (ROPE, SHORT),
    ],
    ids=lambda given: given["rope_type"] if isinstance(given, dict) else "",
)
def test_a_geometry_has_the_length_up_to_which_frequencies_stay(
    rope: dict[str, Any], tokens: int | None
) -> None:
    assert geometry_of(llama(**{"rope_theta": 10000.0, **rope})).rope_tokens == tokens


def test_the_example_server_stays_within_the_frequencies_of_short_prompts(
    session: Session,
) -> None:
    assert launch.longest(seeded(phi3), session.info()) == SHORT
    assert launch.longest(tiny(), session.info()) == min(16 * NUM_PAGES, 512)


def test_dynamic_rope_with_a_fixed_alpha_is_served() -> None:
    rope = {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0, "rope_theta": 10000.0}
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SIZES, rope_parameters=rope))
    assert geometry_of(model).rope_tokens is None
