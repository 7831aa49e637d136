"""`attn_implementation="attnd"` through generate: always the tokens of eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attnd import Client, Session
from attnd.transformers import AttndCache
from tiny_models import (
    MODELS,
    Prompts,
    assert_same,
    generated,
    over,
    padded,
    prompts,
    random_tokens,
    tiny,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [False, True], ids=["each for itself", "prefix shared"])
def test_every_model_generates_the_tokens_of_eager_attention(
    either: Session, name: str, share: bool
) -> None:
    model, batch = tiny(name), prompts(5, 20, 1, prefix=37)
    wanted = generated(model, batch)
    with AttndCache(either, model) as cache:
        if share:
            assert cache.share_prefix(model, batch.ids, batch.mask) == 2 * 37
        assert_same(generated(model, batch, cache), wanted)


def test_padding_takes_no_room_in_the_pool(session: Session) -> None:
    model, batch = tiny(), prompts(2, 40)
    with AttndCache(session, model) as cache:
        generated(model, batch, cache, max_new_tokens=1)
        lengths = [session.get_sequence(name).length for name in cache.sequences]
    assert lengths == [2, 40]


def test_a_shared_prefix_is_stored_once_and_attended_as_a_cascade(session: Session) -> None:
    model, batch = tiny(), prompts(3, 5, 4, prefix=64)
    with AttndCache(session, model) as cache:
        cache.share_prefix(model, batch.ids, batch.mask)
        generated(model, batch, cache, max_new_tokens=2)
        assert session.pool().referenced == 64 // 16 + 3
        assert len(session.page_table(cache.sequences).levels) == 2


def test_groups_of_a_batch_share_more_than_the_whole_batch_does(session: Session) -> None:
    system, document = random_tokens(20, 1), random_tokens(33, 2)
    ends = [random_tokens(length, 3 + length) for length in (4, 9, 2, 6)]
    batch = padded(
        [system + document + ends[0], system + ends[1], system + document + ends[2], ends[3]]
    )
    model = tiny()
    wanted = generated(model, batch)
    with AttndCache(session, model) as cache:
        assert cache.share_prefix(model, batch.ids, batch.mask) == 2 * 20 + 33
        assert_same(generated(model, batch, cache), wanted)


def test_equal_prompts_share_all_but_their_last_token(session: Session) -> None:
    row = random_tokens(40, 1)
    model, batch = tiny(), padded([row, row, row[:30]])
    wanted = generated(model, batch)
    with AttndCache(session, model) as cache:
        assert cache.share_prefix(model, batch.ids, batch.mask) == 2 * 29
        assert_same(generated(model, batch, cache), wanted)


@pytest.mark.parametrize("share", [False, True], ids=["each for itself", "prefix shared"])
def test_beam_search_forks_and_drops_sequences(either: Session, share: bool) -> None:
    model, batch = tiny(), prompts(6, 3, prefix=20)
    beams: dict[str, Any] = {"num_beams": 3, "output_logits": False, "max_new_tokens": 12}
    wanted = generated(model, batch, **beams)
    with AttndCache(either, model) as cache:
        if share:
            cache.share_prefix(model, batch.ids, batch.mask)
            cache.batch_repeat_interleave(3)
        got = generated(model, batch, cache, **beams)
        assert len(cache.sequences) == 6
    assert got.sequences.tolist() == wanted.sequences.tolist()


def test_sampling_draws_what_eager_attention_would(session: Session) -> None:
    model, batch = tiny(), prompts(6, 3)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2}
    torch.manual_seed(3)
    wanted = generated(model, batch, **options)
    torch.manual_seed(3)
    with AttndCache(session, model) as cache:
        assert_same(generated(model, batch, cache, **options), wanted)


def test_a_prefill_in_chunks_is_the_same(session: Session) -> None:
    model, batch = tiny(), prompts(5, 20, 1, prefix=20)
    wanted = generated(model, batch)
    for share in (False, True):
        with AttndCache(session, model) as cache:
            if share:
                cache.share_prefix(model, batch.ids, batch.mask)
            assert_same(generated(model, batch, cache, prefill_chunk_size=7), wanted)


def test_a_chat_continues_with_the_same_cache(session: Session) -> None:
    model, first = tiny(), prompts(5, 12)
    with AttndCache(session, model) as cache:
        for _ in range(3):
            wanted = generated(model, first)
            assert_same(generated(model, first, cache), wanted)
            turn = torch.tensor([random_tokens(4, 5), random_tokens(4, 6)])
            ids = torch.cat([wanted.sequences, turn], dim=1)
            more = torch.ones((2, ids.shape[1] - first.mask.shape[1]), dtype=torch.long)
            first = Prompts(ids, torch.cat([first.mask, more], dim=1))


def test_tokens_after_a_rows_end_can_be_hidden_in_the_next_turn(session: Session) -> None:
    model, batch = tiny(), prompts(9, 4)
    with AttndCache(session, model) as cache:
        said = generated(model, batch, cache).sequences
        turn = torch.tensor([[0, 0, *random_tokens(3, 5)], random_tokens(5, 6)])
        ids = torch.cat([said, turn], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : batch.mask.shape[1]] = batch.mask
        mask[0, -9:-3] = 0  # row 0 had ended four tokens earlier, and its turn is padded
        second = Prompts(ids, mask)
        assert_same(generated(model, second, cache), generated(model, second))


def test_a_prompt_computed_once_is_copied_for_every_batch(session: Session) -> None:
    model, system = tiny(), random_tokens(21, 1)
    with AttndCache(session, model) as kept, torch.inference_mode():
        model(torch.tensor([system]), **over(kept))
        for seed in (2, 3):
            ends = [random_tokens(5, seed), random_tokens(5, seed + 10)]
            batch = padded([system + end for end in ends])
            with copy.deepcopy(kept) as cache:
                cache.batch_repeat_interleave(2)
                assert_same(generated(model, batch, cache), generated(model, batch))
        assert session.pool().sequences == 1


def test_assisted_generation_cuts_rejected_tokens(session: Session) -> None:
    model, batch = tiny(), prompts(12)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 30}
    wanted = generated(model, batch, max_new_tokens=30)
    with AttndCache(session, model) as cache:
        got = generated(model, batch, cache, **options)
    assert got.sequences.tolist() == wanted.sequences.tolist()


def test_a_client_over_http_serves_a_model_too(client: Client, session: Session) -> None:
    model, batch = tiny(), prompts(5, 9, prefix=20)
    with AttndCache(client, model) as cache:
        cache.share_prefix(model, batch.ids, batch.mask)
        assert_same(generated(model, batch, cache), generated(model, batch))


def test_a_long_prefill_goes_in_several_calls(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnd.transformers.host.CALL_BYTES", 13 * 16 * 64 * 4)
    model, batch = tiny(), prompts(5, 20, 1, 31)
    wanted = generated(model, batch)
    with AttndCache(session, model) as cache:
        assert_same(generated(model, batch, cache), wanted)


def test_a_bfloat16_model_is_served_as_it_is(session: Session) -> None:
    model, batch = tiny().to(torch.bfloat16), prompts(5, 9)
    wanted = generated(model, batch, max_new_tokens=1)
    with AttndCache(session, model, dtype="fp32") as cache:
        got = generated(model, batch, cache, max_new_tokens=1)
    scale = wanted.logits[0].abs().max().item()
    assert (got.logits[0] - wanted.logits[0]).abs().max().item() < 0.05 * scale
