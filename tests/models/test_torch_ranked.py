"""`RankedTorchSession` over two engines: the numbers of one that holds all, and refusals of one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from attnd import LengthMismatch, OutOfPages, SequenceExists, TimedOut, UnknownSequence
from attnd.torch import RankedTorchSession, TimeSliced, TorchSession

from kernels import cuda_devices
from tests.session.stepping import HEADS, LAYERS, Served, go_through, serve

pytestmark = pytest.mark.long

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE = 16
RANKS = 2


@pytest.fixture(scope="module", params=KINDS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two engines, on a GPU each where there are two; the second with fewer pages."""
    kind, count = request.param, cuda_devices() if request.param == "cuda" else 1
    if not count:
        pytest.skip("no CUDA device")
    with ExitStack() as stack:
        made = []
        for rank in range(RANKS):
            options = ["--pool.num-pages", str(128 - 64 * rank)]
            options += ["--backend.device", str(rank % count)] if kind == "cuda" else []
            folder = tmp_path_factory.mktemp(f"rank{rank}")
            made.append(stack.enter_context(serve(kind, folder, *options)))
        yield made


@pytest.fixture
def ranked(engines: list[Served]) -> Iterator[RankedTorchSession]:
    paths = [one.path for one in engines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TimeSliced)  # one GPU for engine and tests, without MPS
        session = RankedTorchSession(paths, timeout=60.0, device=engines[0].device)
    with session as made:
        yield made
        for session in made.sessions:
            session.delete_sequences(prefix="")
            reply = session.pool()
            assert reply.integrity == "ok" and reply.free == reply.total, reply


def run(ranked: RankedTorchSession, names: list[str], lens: list[int], at: list[int], seed: int):
    """A step with `lens` rows for the sequences, which have `at` tokens, and sinks of 1."""
    slots = ranked.slots(sum(lens), HEADS, rotation=2, sinks=True)
    slots.sinks.fill_(1.0)
    indptr = None if set(lens) == {1} else [0, *np.cumsum(lens).tolist()]
    with ranked.step(names, slots, at, qo_indptr=indptr) as step:
        kept = go_through(step, range(LAYERS), seed)  # type: ignore[arg-type]
    step.wait()
    return kept


def run_whole(session: TorchSession, names: list[str], lens: list[int], seed: int):
    slots = session.slots(sum(lens), HEADS, rotation=2, sinks=True)
    slots.sinks.fill_(1.0)
    indptr = None if set(lens) == {1} else [0, *np.cumsum(lens).tolist()]
    with session.step(names, slots, qo_indptr=indptr) as step:
        kept = go_through(step, range(LAYERS), seed)
    step.wait()
    return kept


def test_steps_over_two_engines_give_the_numbers_of_one(
    engines: list[Served], ranked: RankedTorchSession
) -> None:
    whole = ranked.sessions[0]
    lengths = {"a": 0, "b": 0}
    for name in lengths:
        ranked.create_sequence(name)
        whole.create_sequence(f"{name}-whole")
    chunks = [[PAGE, PAGE - 1], [1, 1], [1, 1], [2 * PAGE + 1, 5], [3, PAGE], [1, 1], [1, 1]]
    for seed, lens in enumerate(chunks):
        names = list(lengths)
        got = run(ranked, names, lens, list(lengths.values()), seed)
        expected = run_whole(whole, [f"{name}-whole" for name in names], lens, seed)
        for layer, (o, lse) in expected.items():
            close, case = engines[0].close_enough, f"step {seed}, layer {layer}"
            np.testing.assert_allclose(got[layer][0], o, atol=2 * close, err_msg=case)
            np.testing.assert_allclose(got[layer][1], lse, atol=2e-3, err_msg=case)
        for name, count in zip(names, lens, strict=True):
            lengths[name] += count
    held = [session.get_sequence("a").length for session in ranked.sessions]
    assert sum(held) == lengths["a"] and abs(held[0] - held[1]) <= PAGE


def test_a_fork_continues_its_parent_at_every_rank(ranked: RankedTorchSession) -> None:
    ranked.create_sequence("root")
    run(ranked, ["root"], [2 * PAGE + 7], [0], 1)
    ranked.fork("root", "fork", PAGE + 3)
    first = run(ranked, ["fork"], [1], [PAGE + 3], 2)
    ranked.truncate("root", PAGE + 3)
    second = run(ranked, ["root"], [1], [PAGE + 3], 2)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(first[layer][0], second[layer][0])


@pytest.mark.parametrize("lost", range(RANKS))
def test_a_sequence_whose_creation_has_no_reply_is_at_no_rank(
    ranked: RankedTorchSession, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    ranked.create_sequence("old")
    create = TorchSession.create_sequences

    def create_and_lose(session: TorchSession, new: Any) -> Any:
        made = create(session, new)
        if session is ranked.sessions[lost]:
            raise TimedOut("no reply")
        return made

    monkeypatch.setattr(TorchSession, "create_sequences", create_and_lose)
    with pytest.raises(TimedOut):
        ranked.create_sequence("new")
    with pytest.raises(SequenceExists):
        ranked.create_sequence("old")
    held = [[one.id for one in session.list_sequences()] for session in ranked.sessions]
    assert held == [["old"]] * RANKS


def test_a_deletion_reaches_the_ranks_behind_one_that_has_lost_the_sequence(
    ranked: RankedTorchSession,
) -> None:
    ranked.create_sequence("a")
    ranked.sessions[0].delete_sequence("a")
    with pytest.raises(UnknownSequence):
        ranked.delete_sequence("a")
    assert not list(ranked.sessions[1].list_sequences())


def test_a_step_that_one_rank_refuses_has_been_at_none(ranked: RankedTorchSession) -> None:
    ranked.create_sequence("a")
    slots = ranked.slots(160 * PAGE, HEADS)
    step = ranked.step(["a"], slots, [0], qo_indptr=[0, 160 * PAGE])
    with pytest.raises(OutOfPages), step:
        pass
    wrong = ranked.step(["a"], ranked.slots(1, HEADS), [PAGE])
    with pytest.raises(LengthMismatch), wrong:
        pass
    assert [one.get_sequence("a").length for one in ranked.sessions] == [0, 0]
    run(ranked, ["a"], [3], [0], 1)


def test_a_step_that_is_left_early_is_taken_back_at_every_rank(ranked: RankedTorchSession) -> None:
    ranked.create_sequence("a")
    run(ranked, ["a"], [PAGE + 1], [0], 1)
    slots = ranked.slots(1, HEADS)
    with (
        pytest.raises(RuntimeError, match="not released to the engine"),
        ranked.step(["a"], slots, [PAGE + 1]) as step,
    ):
        step.attend(0)
    run(ranked, ["a"], [1], [PAGE + 1], 2)


@pytest.mark.gpu
def test_a_step_over_two_engines_is_captured_in_a_graph(
    engines: list[Served], ranked: RankedTorchSession
) -> None:
    if engines[0].kind != "cuda":
        pytest.skip("graphs are CUDA's")
    ranked.create_sequence("a")
    run(ranked, ["a"], [5 * PAGE], [0], 1)
    slots = ranked.slots(1, HEADS, rotation=2)
    for layer in range(2):
        for part in (slots.q(layer), slots.k(layer), slots.v(layer)):
            part.normal_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            slots.attend(layer)
    seen = []
    for length in range(5 * PAGE, 5 * PAGE + 3 * PAGE):
        with ranked.step(["a"], slots, [length]) as step:
            graph.replay()
            step.release_to_engine()
        step.wait()
        seen.append(slots.o(LAYERS - 1).float().cpu().numpy().copy())
    assert all(np.isfinite(one).all() for one in seen)
    ranked.truncate("a", 5 * PAGE)
    with ranked.step(["a"], slots, [5 * PAGE]) as step:
        for layer in range(LAYERS):
            step.attend(layer)
    step.wait()
    np.testing.assert_allclose(slots.o(LAYERS - 1).float().cpu().numpy(), seen[0], atol=2e-3)
