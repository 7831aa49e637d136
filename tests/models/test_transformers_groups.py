"""Models whose layers differ, in pools of groups of layers: the tokens of eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from attnd import Client
from attnd.transformers import AttndCache, geometry_of, pool_settings
from tiny_models import MODELS, SIZES, assert_same, generated, prompts, seeded, tiny
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from tests.client.running_service import connect, service

pytestmark = pytest.mark.long
KINDS: Final = ["sliding_attention", "full_attention"]
NO_SHAPE: Final = ("--pool.num-layers", "4", "--pool.num-kv-heads", "8", "--pool.head-dim", "128")
"""What the tests' services have instead of groups, back at its defaults."""
GROUPED: Final[dict[str, Callable[[], Any]]] = {
    "gpt-oss": MODELS["gpt-oss, sinks, a window in every other layer"],
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, sliding_window=7, layer_types=KINDS)
    ),
    "gemma4, heads of two sizes": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **SIZES,
            global_head_dim=128,
            num_global_key_value_heads=1,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            sliding_window=7,
            layer_types=KINDS,
        )
    ),
}


@contextmanager
def serving(tmp_path: Any, model: Any, **options: Any) -> Iterator[Client]:
    """A client of a service for the model, with layers of a window as a group of their own."""
    settings = pool_settings(model, groups=True) | {"pool.page-size": 16, "pool.num-pages": 64}
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with (
        service("--server.uds", str(tmp_path / "s"), *NO_SHAPE, *given) as where,
        connect(where) as client,
    ):
        yield client


@pytest.mark.parametrize("name", GROUPED)
def test_a_model_of_several_groups_generates_the_tokens_of_eager_attention(
    tmp_path: Any, name: str
) -> None:
    model, batch = seeded(GROUPED[name]), prompts(5, 20, 1, prefix=37)
    wanted = generated(model, batch)
    with serving(tmp_path, model) as client:
        assert len(client.info().groups or ()) == 2
        for share in (False, True):
            with AttndCache(client, model) as cache:
                if share:
                    cache.share_prefix(model, batch.ids, batch.mask)
                assert_same(generated(model, batch, cache), wanted)
        pool = client.pool()
        assert pool.free + pool.cached == pool.total


def test_the_groups_of_a_model_are_settings() -> None:
    model = tiny("gpt-oss, sinks, a window in every other layer")
    assert "pool.groups" not in pool_settings(model)
    windowed, full = geometry_of(model, groups=True).groups
    assert (windowed.layers, windowed.window) == ((0,), 7)
    assert (full.layers, full.window) == ((1,), None)
    assert "--pool.groups '[{" in geometry_of(model, groups=True).command()
    assert "pool.groups" not in pool_settings(tiny(), groups=True)


def test_the_pool_of_another_model_is_refused_by_its_layer(tmp_path: Any) -> None:
    model = seeded(GROUPED["gpt-oss"])
    with serving(tmp_path, model) as client:
        other = Gemma3TextConfig(**SIZES, sliding_window=9, layer_types=KINDS)
        with pytest.raises(
            ValueError, match=r"layer 0 of the service's pool is \(2, 64, 'fp32', 6"
        ):
            AttndCache(client, seeded(lambda: Gemma3ForCausalLM(other)))
