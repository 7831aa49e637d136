"""`AttndCache`: its errors, its recovery, and the end of its sequences."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attnd import Client, OutOfPages, Session
from attnd.torch import TorchSession
from attnd.transformers import AttndCache, pool_settings
from attnd.transformers.releases import CACHE
from tiny_models import (
    SIZES,
    Prompts,
    assert_same,
    generated,
    over,
    padded,
    prompts,
    random_tokens,
    tiny,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
)

from tests.client.running_service import connect
from tests.harness.processes import python

pytestmark = pytest.mark.long


NUM_PAGES = 8


def configured(**settings: Any) -> Any:
    """A tiny llama whose configuration says something else too."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings})).eval()
    model.set_attn_implementation("attnd")
    return model


@contextmanager
def failing(
    module: torch.nn.Module, error: type[BaseException] = ZeroDivisionError
) -> Iterator[None]:
    """A forward in inference mode that ends by an error before a module of the model."""

    def broken(*_: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(broken)
    with torch.inference_mode(), pytest.raises(error):
        yield
    hook.remove()


def test_another_pool_is_refused_with_the_command_for_the_model(session: Session) -> None:
    model = configured(num_hidden_layers=3, head_dim=32)
    with pytest.raises(ValueError, match="2 layers x 2 KV heads x 64 in fp32") as refused:
        AttndCache(session, model)
    assert str(refused.value).endswith(
        "the model needs 3 layers x 2 KV heads x 32 in fp32: start a service for it with\n"
        "  attnd serve --pool.num-layers 3 --pool.num-kv-heads 2 --pool.head-dim 32 "
        "--pool.dtype fp32"
    )
    assert pool_settings(model)["pool.num-layers"] == 3


def test_a_pool_of_another_dtype_must_be_meant(session: Session) -> None:
    model = tiny().to(torch.bfloat16)
    with pytest.raises(ValueError, match="give dtype='fp32' to have K and V rounded"):
        AttndCache(session, model)
    AttndCache(session, model, dtype="fp32").close()
    with pytest.raises(ValueError, match="attnd takes float32, float16, bfloat16"):
        AttndCache(session, model.to(torch.float64))


@pytest.mark.parametrize(
    ("config", "meaning"),
    [
        (T5Config(), "encoder-decoder models"),
        (Llama4TextConfig(num_hidden_layers=4), "chunked attention"),
        (LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"]), "layers but"),
        (LlamaConfig(**SIZES, num_kv_shared_layers=1), "another layer's keys"),
        (LlamaConfig(**SIZES, kv_lora_rank=16), "latent KV"),
        (LlamaConfig(**SIZES, is_causal=False), "not causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_need_other_attention_are_refused_at_once(
    session: Session, config: PreTrainedConfig, meaning: str
) -> None:
    model = tiny()
    model.config = config
    config._attn_implementation = "attnd"
    with pytest.raises(ValueError, match=f"attnd does not serve .*{meaning}|{meaning}"):
        AttndCache(session, model)


def test_a_model_that_attends_by_itself_is_refused(session: Session) -> None:
    model = tiny()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"'sdpa': call model.set_attn_implementation"):
        AttndCache(session, model)
    model.set_attn_implementation("attnd")
    with AttndCache(session, model) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="layer 0 gave the cache k and v, and its attention"):
            model(prompts(4).ids, **over(cache))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda given: {**given, **over(None)}, f"pass {CACHE}=AttndCache"),
        (lambda given: {**given, **over(DynamicCache())}, f"pass {CACHE}=Attnd"),
        (
            lambda given: {**given, "attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
            "a mask of 4 dimensions",
        ),
        (lambda given: {**given, "attention_mask": torch.ones(1, 3)}, r"is \[1, 3\], not \[1, 4\]"),
        (lambda given: {**given, "output_attentions": True}, "the weights of attention"),
        (lambda given: {**given, "use_cache": False}, "leave use_cache at True"),
    ],
    ids=["no cache", "another cache", "a mask of one's own", "another length", "weights", "unused"],
)
def test_a_forward_that_attnd_cannot_serve_is_refused(
    session: Session, change: Callable[[dict[str, Any]], dict[str, Any]], detail: str
) -> None:
    model = tiny()
    with AttndCache(session, model) as cache, torch.inference_mode():
        given = {"input_ids": prompts(4).ids, **over(cache)}
        with pytest.raises(ValueError, match=detail):
            model(**change(given))
        model(**given)
        assert cache.get_seq_length() == 4


def test_gradients_are_refused(session: Session) -> None:
    model = tiny()
    with (
        AttndCache(session, model) as cache,
        pytest.raises(ValueError, match=r"no gradients: run under torch.inference_mode"),
    ):
        model(prompts(4).ids, **over(cache))


def test_another_number_of_rows_is_refused_with_the_remedy(session: Session) -> None:
    model = tiny()
    with AttndCache(session, model) as cache:
        generated(model, prompts(4, 6), cache)
        with pytest.raises(ValueError, match=r"3 rows and the cache 2: batch_repeat_interleave"):
            generated(model, prompts(4, 30, 2), cache)


def test_a_forward_without_pages_is_taken_back_and_can_be_repeated(
    either: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnd.transformers.host.CALL_BYTES", 40 * 16 * 64 * 4)
    model, batch = tiny(), prompts(25, 25)
    with AttndCache(either, model) as cache, torch.inference_mode():
        model(batch.ids[:, :-1], **over(cache))
        longer = padded([random_tokens(70, 1), random_tokens(70, 2)])
        with pytest.raises(OutOfPages):
            model(longer.ids, **over(cache))
        assert cache.get_seq_length() == 24
        assert [either.get_sequence(name).lengths for name in cache.sequences] == [(24, 24)] * 2
        assert_same(generated(model, batch, cache), generated(model, batch))


def test_an_error_of_the_model_in_mid_forward_is_taken_back(either: Session) -> None:
    model, batch = tiny(), prompts(9, 12)

    with AttndCache(either, model) as cache:
        with failing(model.model.layers[1]):
            model(batch.ids, attention_mask=batch.mask, **over(cache))
        assert cache.get_seq_length() == 0
        assert_same(generated(model, batch, cache), generated(model, batch))


INHERITED = {
    *("activate_past_recording", "early_initialization", "get_query_offset", "has_previous_state"),
    *("is_compileable", "is_croppable", "is_dummy", "is_linear", "is_recording_past", "is_sliding"),
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    *("update_indexer", "offload", "prefetch"),
}
"""Of transformers' Cache: right for an AttndCache as they are."""


def test_a_cache_describes_its_layers_to_transformers(session: Session) -> None:
    members = {name for name in dir(Cache) if not name.startswith("_")}
    assert members <= vars(AttndCache).keys() | INHERITED, "look at what a new release asks"
    with AttndCache(session, tiny()) as cache:
        assert (len(cache), cache.is_croppable, cache.is_compileable) == (2, True, False)
        for kinds in (cache.is_linear, cache.is_sliding, cache.is_dummy):
            assert kinds == [False, False]


def test_crop_takes_back_the_last_columns(session: Session) -> None:
    model, batch = tiny(), prompts(5, 12)
    with AttndCache(session, model) as cache:
        generated(model, batch, cache)
        assert cache.get_seq_length() == 21
        cache.crop(-12)
        assert [session.get_sequence(name).length for name in cache.sequences] == [2, 9]
        assert_same(generated(model, batch, cache), generated(model, batch))
        with pytest.raises(ValueError, match="-n removes the last n columns"):
            cache.crop(3)


def test_rows_are_chosen_by_number_or_mask(session: Session) -> None:
    model, batch = tiny(), prompts(5, 12, 9)
    with AttndCache(session, model) as cache:
        generated(model, batch, cache, max_new_tokens=1)
        first = cache.sequences
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        assert (cache.sequences[0], cache.sequences[1]) == (first[2], first[0])
        assert session.get_sequence(cache.sequences[2]).length == 9
        cache.batch_select_indices(torch.tensor([False, True, True]))
        assert [session.get_sequence(name).length for name in cache.sequences] == [5, 9]
        assert (cache.batch_size, session.pool().sequences) == (2, 2)


def test_a_fork_goes_its_own_way(session: Session) -> None:
    model, batch = tiny(), prompts(20, 20)
    single = Prompts(batch.ids[1:], batch.mask[1:])
    with AttndCache(session, model) as cache, torch.inference_mode():
        model(batch.ids[:, :-1], **over(cache))
        with cache.fork([1]) as fork:
            assert_same(generated(model, single, fork), generated(model, single))
        assert_same(generated(model, batch, cache), generated(model, batch))


def test_a_prefix_is_shared_before_anything_else(session: Session) -> None:
    model, batch = tiny(), prompts(3, 4, prefix=20)
    with AttndCache(session, model) as cache:
        generated(model, batch, cache, max_new_tokens=1)
        with pytest.raises(RuntimeError, match="share_prefix comes first"):
            cache.share_prefix(model, batch.ids, batch.mask)
        cache.reset()
        assert cache.share_prefix(model, batch.ids, batch.mask) == 20


def test_a_shared_prefix_without_pages_leaves_nothing_behind(session: Session) -> None:
    model, batch = tiny(), prompts(3, 4, prefix=200)
    with AttndCache(session, model) as cache:
        with pytest.raises(OutOfPages):
            cache.share_prefix(model, batch.ids, batch.mask)
        assert session.pool().sequences == 0
        assert cache.get_seq_length() == 0


def test_a_closed_cache_says_so(session: Session) -> None:
    model = tiny()
    cache = AttndCache(session, model)
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        generated(model, prompts(4), cache)


def test_sequences_of_a_collected_cache_are_deleted(session: Session) -> None:
    model = tiny()
    generated(model, prompts(4, 5), AttndCache(session, model))
    ends = time.monotonic() + 10
    while session.pool().sequences and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.01)
    assert session.pool().sequences == 0


def test_a_process_that_ends_leaves_no_sequences_and_a_forked_one_those_of_its_parents_cache(
    session: Session, socket: str
) -> None:
    program = (
        "import gc, os, sys, time; sys.path[:0] = ['tests/models', '.']\n"
        "from attnd import Session; from attnd.transformers import AttndCache\n"
        "from tiny_models import generated, prompts, tiny\n"
        "session, model = Session(sys.argv[1]), tiny()\n"
        "cache = AttndCache(session, model)\n"
        "generated(model, prompts(4, 5), cache)\n"
        "for end in ('sys.exit()', 'cache.close(); os._exit(0)', 'session.close(); os._exit(0)',\n"
        "            'del cache; gc.collect(); time.sleep(0.2); os._exit(0)'):\n"
        "    if (child := os.fork()) == 0:\n"
        "        exec(end)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(session.pool().sequences)\n"
        "cache.close()\n"
        "print(session.pool().sequences)\n"
        "left = AttndCache(session, model)\n"
        "generated(model, prompts(4, 5), left)\n"
        "print(session.pool().sequences)\n"
    )
    assert python(program, socket).split() == ["2"] * 4 + ["0", "2"]
    assert session.pool().sequences == 0


def test_a_session_that_is_closed_first_deletes_the_sequences_of_its_caches(
    client: Client, socket: str
) -> None:
    model = tiny()
    session = Session(socket)
    view = session.with_options(request_id="a view")
    caches = [AttndCache(session, model), AttndCache(view, model)]
    for cache in caches:
        generated(model, prompts(4), cache)
    caches.append(caches[0].fork())
    collected = AttndCache(session, model)
    generated(model, prompts(4), collected)
    del collected, cache
    gc.collect()
    session.close()
    assert client.pool().sequences == 0
    for cache in caches:
        cache.close()
        cache.close()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        generated(model, prompts(4), caches[0])


def test_a_client_that_is_closed_first_deletes_the_sequences_of_its_caches(
    client: Client, where: str
) -> None:
    model = tiny()
    with connect(where) as other:
        caches = [AttndCache(other, model), AttndCache(other.with_options(deadline=9.0), model)]
        for cache in caches:
            generated(model, prompts(4), cache)
    assert client.pool().sequences == 0
    for cache in caches:
        cache.close()


def test_a_forward_in_inference_mode_may_be_followed_by_one_outside(session: Session) -> None:
    model, batch = tiny(), prompts(9, 12)
    with AttndCache(session, model) as cache:
        with torch.inference_mode():
            model(batch.ids, attention_mask=batch.mask, **over(cache))
        cache.reset()
        assert_same(generated(model, batch, cache), generated(model, batch))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [0, 5])
def test_an_error_behind_the_last_attention_takes_the_forward_back(
    either: Session, error: type[BaseException], tokens: int
) -> None:
    model, batch = tiny(), prompts(9, 12)

    with AttndCache(either, model) as cache, torch.inference_mode():
        if tokens:
            model(batch.ids[:, :tokens], attention_mask=batch.mask[:, :tokens], **over(cache))
        given = {
            "input_ids": batch.ids[:, tokens:],
            "attention_mask": batch.mask,
            **over(cache),
        }
        for _ in range(2):
            with failing(model.lm_head, error):
                model(**given)
        if error is ZeroDivisionError:
            assert cache.get_seq_length() == tokens
        logits = model(**given).logits[:, -1]
        stored = [either.get_sequence(name).length for name in cache.sequences]
        assert stored == [9, 12]
        wanted = tiny()
        wanted.set_attn_implementation("eager")
        expected = wanted(batch.ids, attention_mask=batch.mask).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_caches_of_a_model_and_of_its_part_both_know_the_whole_call(session: Session) -> None:
    model, batch = tiny(), prompts(9, 12)

    with AttndCache(session, model.model), AttndCache(session, model) as cache:
        with failing(model.lm_head):
            model(batch.ids, attention_mask=batch.mask, **over(cache))
        assert cache.get_seq_length() == 0
        assert_same(generated(model, batch, cache), generated(model, batch))


def test_an_error_in_mid_forward_frees_its_sequences_at_once(socket: str, client: Client) -> None:
    model, batch = tiny(), prompts(9, 12)

    with TorchSession(socket) as session, AttndCache(session, model) as cache:
        with failing(model.model.layers[1]):
            model(batch.ids, attention_mask=batch.mask, **over(cache))
        hurried = client.with_options(deadline=2.0)
        for name in cache.sequences:
            hurried.truncate(name, 0)


def of(kind: str, **sizes: Any) -> Any:
    """A tiny model of a type, with its own defaults elsewhere."""
    common = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **{**common, **sizes})
    config._attn_implementation = None
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("attnd")
    return model


@pytest.mark.parametrize("kind", ["bloom", "falcon", "xglm"])
def test_a_model_with_attention_of_its_own_is_refused_with_that_reason(
    session: Session, kind: str
) -> None:
    model = of(kind)
    for refused in (lambda: AttndCache(session, model), lambda: pool_settings(model)):
        with pytest.raises(ValueError, match="computes attention in its own code"):
            refused()


@pytest.mark.parametrize("kind", ["rwkv", "xlstm"])
def test_a_model_without_attention_is_refused_with_that_reason(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=1))
    with pytest.raises(ValueError, match="keeps no keys and values"):
        pool_settings(model)


def test_lists_of_a_configuration_that_ask_for_nothing_are_no_reason() -> None:
    model = tiny()
    model.config.kv_sharing_modes = [None, None]
    assert pool_settings(model)["pool.num-layers"] == 2
    model.config.kv_sharing_modes = [None, "last"]
    with pytest.raises(ValueError, match="another layer's keys"):
        pool_settings(model)


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_model_that_changes_keys_or_values_behind_the_cache_is_refused_with_that_reason(
    session: Session, which: str
) -> None:
    model = tiny()
    update = AttndCache.update

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = update(self, *args, **kwargs)
        return (key.clone(), value) if which == "key" else (key, value.clone())

    with AttndCache(session, model) as cache, torch.inference_mode():
        cache.update = changed.__get__(cache)
        with pytest.raises(ValueError, match=rf"LlamaAttention changes the {which}s between"):
            model(prompts(4).ids, **over(cache))
        del cache.update
        model(prompts(4).ids, **over(cache))
        assert cache.get_seq_length() == 4


def test_a_mask_that_no_layer_attends_with_is_no_reason_to_refuse(session: Session) -> None:
    config = Qwen2MoeConfig(
        **SIZES,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen2MoeForCausalLM(config).eval()
    assert config.sliding_window == 0
    model.set_attn_implementation("attnd")
    batch = prompts(9, 12)
    with AttndCache(session, model) as cache:
        assert_same(generated(model, batch, cache), generated(model, batch))
