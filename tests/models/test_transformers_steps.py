"""Models over a `TorchSession`: the tokens of eager attention, and the same care of errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attnd import Client, Session
from attnd.torch import EmbeddedSession, Placement, TimeSliced, TorchSession
from attnd.transformers import AttndCache
from packaging.version import Version
from tiny_models import (
    MODELS,
    Prompts,
    assert_same,
    generated,
    over,
    prompts,
    tiny,
)

from tests.client.running_service import connect, service

pytestmark = pytest.mark.long


NUM_PAGES = 24


def test_a_layer_that_attends_unlike_its_step_is_refused(torch_session: TorchSession) -> None:
    model, batch = tiny(), prompts(9)
    model.model.layers[1].self_attn.scaling = 0.5
    with AttndCache(torch_session, model) as cache, torch.inference_mode():
        with pytest.raises(ValueError, match="layer 1 attends with Scoring"):
            model(batch.ids, **over(cache))
        model.model.layers[1].self_attn.scaling = model.model.layers[0].self_attn.scaling
        assert_same(generated(model, batch, cache), generated(model, batch))


def test_in_the_engines_cuda_context_layers_are_calls(
    embedded_session: EmbeddedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_session, "placement", Placement("same_process", 1.0))
    model, batch = tiny(), prompts(9, 4)
    with AttndCache(embedded_session, model) as cache:
        assert_same(generated(model, batch, cache), generated(model, batch))
        with pytest.raises(RuntimeError, match="with its engine in another process"):
            cache.graphs(model)


def test_longer_prefills_get_larger_memory(client: Client, socket: str) -> None:
    model = tiny()
    with (
        TorchSession(socket, arena_bytes=2**21) as session,
        AttndCache(session, model) as cache,
    ):
        for length in (2, 12, 1, 150):
            batch = prompts(length, length)
            with cache.graphs(model):
                assert_same(generated(model, batch, cache), generated(model, batch))
            cache.reset()


@pytest.mark.parametrize("name", MODELS)
def test_replayed_decodes_give_the_same_tokens(torch_session: TorchSession, name: str) -> None:
    model, batch = tiny(name), prompts(5, 20, 1, prefix=37)
    wanted = generated(model, batch)
    with AttndCache(torch_session, model) as cache:
        for replayed in (8, 17):  # of nine decodes; only the very first one warms up
            cache.share_prefix(model, batch.ids, batch.mask)
            with cache.graphs(model) as decodes:
                assert_same(generated(model, batch, cache), wanted)
            assert decodes.replayed == replayed
            cache.reset()
    assert "forward" not in vars(model)


def test_a_forward_that_is_no_decode_runs_as_it_is(torch_session: TorchSession) -> None:
    model, batch = tiny(), prompts(6, 6)
    beams: dict[str, Any] = {"num_beams": 3, "output_logits": False, "max_new_tokens": 12}
    wanted = generated(model, batch, **beams)
    with AttndCache(torch_session, model) as cache, cache.graphs(model) as decodes:
        assert generated(model, batch, cache, **beams).sequences.equal(wanted.sequences)
        assert decodes.replayed > 0
        before = decodes.replayed
        assert_same(generated(model, prompts(4)), generated(model, prompts(4)))
        with (
            torch.inference_mode(),
            pytest.warns(RuntimeWarning, match="inputs include output_hidden_states"),
        ):
            hidden = model(
                input_ids=torch.ones(6, 1, dtype=torch.long),
                position_ids=torch.full((6, 1), 20),
                **over(cache),
                output_hidden_states=True,
            ).hidden_states
        assert len(hidden) == 3
        assert decodes.replayed == before


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="not with older torch")
def test_a_compiled_model_attends_between_its_graphs(torch_session: TorchSession) -> None:
    model, batch = tiny(), prompts(9, 9)
    wanted = generated(model, batch, max_new_tokens=4)
    compiled = torch.compile(model, backend="eager")
    with AttndCache(torch_session, compiled) as cache:
        for _ in range(2):  # the second time with the graphs of the first
            cache.reset()
            with torch.inference_mode():
                compiled(batch.ids, **over(cache))
                logits = compiled(wanted.sequences[:, 9:10], **over(cache)).logits
            torch.testing.assert_close(logits[:, -1], wanted.logits[1], atol=1e-3, rtol=1e-3)
        cache.reset()
        with cache.graphs(compiled) as decodes:
            assert_same(generated(compiled, batch, cache, max_new_tokens=4), wanted)
        assert decodes.replayed == 2


def test_graphs_need_steps(client: Client, socket: str) -> None:
    model = tiny()
    with (
        Session(socket) as session,
        AttndCache(session, model) as cache,
        pytest.raises(RuntimeError, match=r"graphs need an attnd.torch.TorchSession"),
        cache.graphs(model),
    ):
        pass


@pytest.fixture(scope="module")
def device_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchSession]:
    """Of a service on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    road = str(tmp_path_factory.mktemp("g") / "road")
    path = str(tmp_path_factory.mktemp("g") / "s")
    arguments = ("--backend.kind", "cuda", "--pool.dtype", "fp16", "--server.uds", path)
    with service(*arguments, "--server.socket", road) as where, connect(where):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TimeSliced)  # engine and model may share one GPU here
            session = TorchSession(road)
        with session:
            yield session


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [False, True], ids=["each for itself", "prefix shared"])
def test_on_a_gpu_logits_equal_eager_attention(
    device_session: TorchSession, name: str, share: bool
) -> None:
    model = tiny(name).to("cuda", torch.float16)
    on_host = prompts(5, 20, 1, prefix=37)
    batch = Prompts(on_host.ids.cuda(), on_host.mask.cuda())
    wanted = generated(model, batch, max_new_tokens=2)
    with AttndCache(device_session, model) as cache:
        if share:
            cache.share_prefix(model, batch.ids, batch.mask)
        got = generated(model, batch, cache, max_new_tokens=2)
    scale = wanted.logits[0].abs().max().item()
    error = (got.logits[0] - wanted.logits[0]).abs().max().item()
    assert error < 0.02 * scale, f"logits up to {scale:.1f} are {error:.2e} apart"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_replayed_decodes_give_the_logits_of_others(
    device_session: TorchSession, name: str
) -> None:
    model = tiny(name).to("cuda", torch.float16)
    on_host = prompts(5, 20, 1, prefix=37)
    batch = Prompts(on_host.ids.cuda(), on_host.mask.cuda())
    with AttndCache(device_session, model) as cache:
        wanted = generated(model, batch, cache)
        cache.reset()
        with cache.graphs(model) as decodes:
            got = generated(model, batch, cache)
        assert (decodes.replayed, decodes.refused) == (8, False)
    for step, (ours, theirs) in enumerate(zip(got.logits, wanted.logits, strict=True)):
        error = (ours - theirs).abs().max().item()
        assert error <= 1e-3 * theirs.abs().max().item(), f"step {step}: {error:.1e} apart"


@pytest.mark.gpu
def test_graphs_of_a_model_on_another_gpu_than_the_current_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    road = str(tmp_path / "road")
    arguments = ("--backend.kind", "cuda", "--pool.dtype", "fp16", "--server.uds")
    on_host = prompts(5, 20)
    torch.cuda.set_device(0)
    with service(*arguments, str(tmp_path / "s"), "--server.socket", road):
        for number in (0, 1):
            model = tiny().to(f"cuda:{number}", torch.float16)
            batch = Prompts(on_host.ids.to(model.device), on_host.mask.to(model.device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TimeSliced)
                session = TorchSession(road, device=number)
            with session, AttndCache(session, model) as cache:
                wanted = generated(model, batch, cache)
                cache.reset()
                with cache.graphs(model) as decodes:
                    got = generated(model, batch, cache)
                assert (decodes.replayed, decodes.refused) == (8, False)
            assert got.sequences.tolist() == wanted.sequences.tolist()
