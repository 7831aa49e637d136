"""`TorchSession` on a running service: numbers, refusals, aborts, deaths, and others beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attnd import (
    ArenaFull,
    DeadlineExceeded,
    InvalidRequest,
    LengthMismatch,
    OutOfPages,
    TimedOut,
    UnknownSequence,
)
from attnd.torch import Step, TorchSession

from kernels import cuda_devices
from tests.harness.processes import ROOT
from tests.session.stepping import (
    HEADS,
    LAYERS,
    Served,
    child,
    decode_slots,
    embed,
    fresh,
    go_through,
    inputs,
    prefill,
    serve,
    session_of,
)

GPU = pytest.mark.gpu
KINDS = ["cpu", pytest.param("cuda", marks=GPU)]
PLACES = [
    *KINDS,
    pytest.param("cpu, embedded", marks=pytest.mark.long),
    pytest.param("cuda, embedded", marks=GPU),
]


@pytest.fixture(scope="module", params=PLACES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, _, is_embedded = request.param.partition(", ")
    if kind == "cuda" and not cuda_devices():
        pytest.skip("no CUDA device")
    with (embed if is_embedded else serve)(kind, tmp_path_factory.mktemp("steps")) as running:
        yield running


@pytest.fixture
def session(served: Served) -> Iterator[TorchSession]:
    with ignoring_time_slices(), session_of(served) as made:
        yield made
        for info in list(made.list_sequences()):
            made.delete_sequence(info.id)
        reply = made.pool()
        assert reply.integrity == "ok" and reply.free == reply.total, reply


@contextmanager
def ignoring_time_slices() -> Iterator[None]:
    """One GPU for engine and tests, without MPS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def test_a_session_that_cannot_be_made_leaves_none_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[TorchSession] = []

    def fails(session: TorchSession) -> None:
        found.append(session)
        raise RuntimeError("no placement")

    monkeypatch.setattr(TorchSession, "_measure", fails)
    with pytest.raises(RuntimeError, match="no placement"):
        served.session()
    with pytest.raises(RuntimeError, match="the session is closed"):
        found[0].info()


def expect_same(served: Served, mine: Any, theirs: Any, case: str) -> None:
    finite = np.isfinite(theirs)
    assert (np.isfinite(mine) == finite).all(), case
    worst = np.abs(np.where(finite, mine, 0) - np.where(finite, theirs, 0)).max(initial=0)
    assert worst <= served.close_enough, f"{case}: {worst}"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"sm_scale": 0.3, "logits_soft_cap": 5.0},
    {"lse_base": "2"},
    {"window_left": 3},
    {"cascade": "never"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_gives_the_results_of_the_layers_operations(
    served: Served, session: TorchSession, options: dict[str, Any]
) -> None:
    fresh(session, ["root"])
    prefill(session, ["root"], [37])
    mine = fresh(session, ["a", "b"], "root") + fresh(session, ["c"])
    twins = fresh(session, ["a2", "b2"], "root") + fresh(session, ["c2"])
    rows, indptr = 9, [0, 4, 5, 9]
    slots = session.slots(rows, HEADS, rotation=2)
    with session.step(mine, slots, qo_indptr=indptr, **options) as step:
        got = go_through(step, range(LAYERS), 7)
    step.wait()
    batch = decode_slots(session, 3)
    rest = {name: value for name, value in options.items() if name != "causal"}
    with session.step(mine, batch, **rest) as step:
        decoded = go_through(step, range(LAYERS), 11)
    step.wait()
    causal = options.get("causal", True)
    for layer in range(LAYERS):
        tensors = inputs(rows, layer, 7, served.dtype)
        reply = session.prefill(layer, twins, qo_indptr=indptr, causal=causal, **tensors, **rest)
        expect_same(served, got[layer][0], reply.o.astype(np.float32), f"o of layer {layer}")
        expect_same(served, got[layer][1], reply.lse, f"lse of layer {layer}")
        tensors = inputs(3, layer, 11, served.dtype)
        reply = session.decode(layer, twins, **tensors, **rest)
        expect_same(served, decoded[layer][0], reply.o.astype(np.float32), f"o, decode, {layer}")
        expect_same(served, decoded[layer][1], reply.lse, f"lse, decode, {layer}")
    assert [session.get_sequence(name).length for name in mine] == [42, 39, 5]


@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_each_layer_may_have_sinks_of_its_own(
    served: Served, session: TorchSession, lse_base: Any
) -> None:
    fresh(session, ["a", "b"])
    prefill(session, ["a", "b"], [20, 33])
    slots = session.slots(2, HEADS, sinks=True, rotation=2)
    sinks = np.arange(LAYERS * HEADS, dtype=np.float32).reshape(LAYERS, HEADS) / 3
    sinks[1] = -np.inf
    for layer in (0, 2):  # layer 1 has -inf until they are written
        slots.sinks[layer].copy_(torch.from_numpy(sinks[layer]))
    for _ in range(3):  # on CUDA the last ones by a graph
        with session.step(["a", "b"], slots, append=False, lse_base=lse_base) as step:
            got = go_through(step, range(LAYERS), 3)
        step.wait()
        for layer in range(LAYERS):
            q = inputs(2, layer, 3, served.dtype)["q"]
            reply = session.decode(layer, ["a", "b"], q, sinks=sinks[layer], lse_base=lse_base)
            case = f"layer {layer}"
            expect_same(served, got[layer][0], reply.o.astype(np.float32), case)
            expect_same(served, got[layer][1], reply.lse, case)


def test_tensors_of_slots_keep_their_memory_when_the_slots_are_gone(session: TorchSession) -> None:
    kept = session.slots(2, HEADS).o(0)
    part = kept[1:]
    kept.fill_(7.0)
    del kept
    for _ in range(4):
        others = [decode_slots(session, 2) for _ in range(3)]
        for slots in others:
            slots.q(0).fill_(1.0)
            slots.o(0).fill_(2.0)
    assert (part == 7.0).all()


def test_inputs_written_with_gradients_are_refused_once(session: TorchSession) -> None:
    fresh(session, ["a"])
    slots = session.slots(1, HEADS, sinks=True)
    weight = torch.ones(1, device=slots.q(0).device, requires_grad=True)
    written = {"q": slots.q(0), "k": slots.k(0), "v": slots.v(0), "sinks": slots.sinks}
    for name, tensor in written.items():
        tensor.copy_((weight * 2.0).expand(tensor.shape))
        refused = pytest.raises(ValueError, match=f"{name} was written with a gradient")
        with refused, session.step(["a"], slots) as step:
            step.attend(0)
        assert not tensor.requires_grad
    with session.step(["a"], slots) as step:
        go_through(step, range(LAYERS), 1)
    step.wait()


def test_each_layer_may_have_a_window_of_its_own(served: Served, session: TorchSession) -> None:
    fresh(session, ["a", "b"])
    prefill(session, ["a", "b"], [20, 33])
    slots = decode_slots(session, 2)
    windows = [-1, 4, 9]
    with session.step(["a", "b"], slots, append=False, window_left=windows) as step:
        got = go_through(step, range(LAYERS), 3)
    step.wait()
    for layer in range(LAYERS):
        q = inputs(2, layer, 3, served.dtype)["q"]
        reply = session.decode(layer, ["a", "b"], q, window_left=windows[layer])
        expect_same(served, got[layer][0], reply.o.astype(np.float32), f"layer {layer}")


def test_many_steps_follow_each_other_and_say_the_next_one_ahead(
    served: Served, session: TorchSession
) -> None:
    names = fresh(session, ["a", "b", "c"])
    prefill(session, names, [5, 16, 31])
    slots = decode_slots(session, 3)
    total, got = 40, {}
    ahead = session.step(names, slots)
    for number in range(total):
        with ahead as step:
            got = go_through(step, range(LAYERS), 100 * number)
            if number + 1 < total:
                ahead = session.step(names, slots)
    step.wait()
    assert [session.get_sequence(name).length for name in names] == [45, 56, 71]
    tensors = inputs(3, LAYERS - 1, 100 * (total - 1), served.dtype)
    reply = session.decode(LAYERS - 1, names, tensors["q"])
    expect_same(served, got[LAYERS - 1][0], reply.o.astype(np.float32), "the last step")


def state(session: TorchSession) -> Any:
    reply = session.pool()
    lengths = {info.id: info.lengths for info in session.list_sequences()}
    return lengths, reply.free, reply.nodes, reply.integrity


def test_a_step_that_is_refused_changes_nothing(session: TorchSession) -> None:
    names = fresh(session, ["a", "b"])
    prefill(session, names, [20, 3])
    session.append(1, ["b"], *[np.zeros((1, 2, 64), np.float16)] * 2)
    slots, before = decode_slots(session, 1), state(session)
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (UnknownSequence, {"sequences": ["missing"]}),
        (LengthMismatch, {"sequences": ["a"], "offsets": [19]}),
        (InvalidRequest, {"sequences": ["b"]}),  # one token more at layer 1
        (InvalidRequest, {"sequences": ["a"], "layers": [0, 9]}),
        (InvalidRequest, {"sequences": ["a"], "layers": [0, 0]}),
        (InvalidRequest, {"sequences": ["a"], "window_left": [1, 2]}),
        (LengthMismatch, {"sequences": ["a"], "append": False, "offsets": [19]}),
    ]
    for error, asked in refused:
        with pytest.raises(error):
            session.step(asked.pop("sequences"), slots, **asked).__enter__()
        assert state(session) == before, asked
    wide = session.slots(2100, HEADS)
    with pytest.raises(OutOfPages):
        session.step(["a"], wide, qo_indptr=[0, 2100]).__enter__()
    assert state(session) == before


@pytest.mark.parametrize("layers", [0, 1, LAYERS - 1])
def test_an_exception_leaves_everything_as_before_the_step(
    session: TorchSession, layers: int
) -> None:
    names = fresh(session, ["a", "b"])
    prefill(session, names, [16, 15])
    slots, before = decode_slots(session, 2), state(session)
    with pytest.raises(KeyError), session.step(names, slots) as step:
        go_through(step, range(layers), 5)
        raise KeyError("the caller's own")
    assert state(session) == before
    with (
        pytest.raises(RuntimeError, match="not released to the engine"),
        session.step(names, slots),
    ):
        pass
    with session.step(names, slots) as step:
        go_through(step, range(LAYERS), 5)
    step.wait()
    assert session.get_sequence("a").length == 17


def test_a_step_out_of_time_is_undone_and_the_next_call_says_so(session: TorchSession) -> None:
    names = fresh(session, ["a"])
    prefill(session, names, [16])
    slots, before = decode_slots(session, 1), state(session)
    with pytest.raises(DeadlineExceeded), session.step(names, slots, deadline=0.2) as step:
        go_through(step, [0], 5)
        time.sleep(0.5)
        go_through(step, range(1, LAYERS), 5)
        step.wait()
    assert state(session) == before
    with session.step(names, slots) as step:
        go_through(step, range(LAYERS), 5)
    step.wait()
    assert session.get_sequence("a").length == 17


def test_steps_said_ahead_go_with_the_one_that_is_aborted(session: TorchSession) -> None:
    names = fresh(session, ["a"])
    prefill(session, names, [15])
    slots, before = decode_slots(session, 1), state(session)
    ahead: Step | None = None
    with pytest.raises(KeyError), session.step(names, slots) as step:
        ahead = session.step(names, slots)
        go_through(step, [0], 5)
        raise KeyError
    assert ahead is not None
    with pytest.raises(Exception, match=r"aborted|took"):
        ahead.__enter__()
        ahead.wait()
    assert state(session) == before


def test_other_work_continues_beside_an_open_step_and_its_sequences_wait(
    served: Served, session: TorchSession
) -> None:
    names = fresh(session, ["a", "b"])
    prefill(session, names, [16, 40])
    slots = decode_slots(session, 1)
    with served.session() as other:
        fresh(other, ["c"])
        theirs = decode_slots(other, 1)
        with session.step(["a"], slots) as step:
            go_through(step, [0], 5)
            prefill(other, ["c"], [30])
            with other.step(["c"], theirs) as beside:
                go_through(beside, range(LAYERS), 9)
            beside.wait()
            q = np.zeros((1, HEADS, 64), np.float16)
            other.decode(0, ["b"], q)
            hurried = other.with_options(deadline=0.2)
            for asked in (
                lambda: hurried.decode(0, ["a"], q),
                lambda: hurried.truncate("a", 3),
                lambda: hurried.delete_sequence("a"),
                lambda: hurried.create_sequence("fork", parent="a"),
                lambda: other.step(["a"], theirs, deadline=0.2).__enter__(),
            ):
                with pytest.raises((DeadlineExceeded, TimedOut)):
                    asked()
            other.create_sequence("fork", parent="b", length=20)
            go_through(step, range(1, LAYERS), 5)
        step.wait()
        assert other.get_sequence("c").length == 31
    assert session.get_sequence("a").length == 17


CALLER = """
import os, signal, warnings
warnings.simplefilter("ignore")
from tests.session.stepping import *

def come_to(phase):
    warnings.simplefilter("ignore")
    session = served.session()
    slots = decode_slots(session, 2)
    step = session.step(["a", "b"], slots)
    if phase == "described":
        return
    step.__enter__()
    ahead = session.step(["a", "b"], slots)
    if phase == "written":
        fill((slots.q(0), slots.k(0)), 3)
    if phase == "handed":
        go_through(step, [0], 5)
    if phase == "midway":
        go_through(step, [0, 1], 5)
    if phase == "ahead":
        go_through(step, range(LAYERS), 5)
        ahead.__enter__()
        go_through(ahead, [0], 5)

served = Served(*sys.argv[1:])
for phase in sys.stdin:
    if os.fork() == 0:
        come_to(phase.strip())
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.wait()[1], flush=True)
"""
"""A caller that is killed at chosen points, many times: torch is loaded once."""


@pytest.mark.long
def test_a_caller_killed_anywhere_leaves_no_trace(served: Served, session: TorchSession) -> None:
    names = fresh(session, ["a", "b"])
    prefill(session, names, [16, 31])
    before, slots = state(session), decode_slots(session, 2)
    with child(CALLER, served.kind, served.path) as caller:
        assert caller.stdin is not None and caller.stdout is not None
        for phase in ("described", "opened", "written", "handed", "midway", "ahead"):
            caller.stdin.write(f"{phase}\n")
            caller.stdin.flush()
            assert caller.stdout.readline() == f"{int(signal.SIGKILL)}\n", phase
            with session.step(names, slots) as step:  # waits until the dead one's is undone
                go_through(step, range(LAYERS), 5)
            step.wait()
            assert session.get_sequence("a").length == 17 + (phase == "ahead"), phase
            session.truncate("a", 16)
            session.truncate("b", 31)
            assert state(session) == before, phase
        caller.stdin.close()


def test_deleted_slots_make_room_for_larger_ones(session: TorchSession) -> None:
    for rows in (1, 2**12, 2**14):
        slots = session.slots(rows, HEADS)
        assert slots.q(0).shape[0] == rows
        del slots
    fresh(session, ["a"])
    prefill(session, ["a"], [1500])
    assert session.get_sequence("a").length == 1500


def test_slots_beyond_the_arena_are_beside_the_others_and_keep_their_addresses(
    served: Served, session: TorchSession
) -> None:
    names = fresh(session, ["a", "b", "c"])
    small = decode_slots(session, 1)
    address, many = small.q(0).data_ptr(), 2**14
    small.q(0).fill_(7.0)
    large = session.slots(many, HEADS)
    larger = session.slots(2 * many, HEADS)
    assert small.q(0).data_ptr() == address and bool((small.q(0) == 7.0).all())
    for number, slots in enumerate((large, small, larger, large, small)):
        with session.step([names[number % 3]], slots) as step:
            got = go_through(step, range(LAYERS), number)
        step.wait()
        tensors = inputs(slots.rows, 0, number, served.dtype)
        q = tensors["q"][:1]
        reply = session.decode(0, [names[number % 3]], q)
        expect_same(served, got[0][0][:1], reply.o.astype(np.float32), f"step {number}")


def test_steps_over_two_arenas_run_in_the_order_of_their_making(session: TorchSession) -> None:
    fresh(session, ["a"])
    first, second = decode_slots(session, 1), session.slots(2**14, HEADS)
    for _ in range(5):
        one, two = session.step(["a"], first), session.step(["a"], second)
        for step in (one, two):
            with step:
                go_through(step, range(LAYERS), 1)
    two.wait()
    assert session.get_sequence("a").length == 10


def test_slots_larger_than_any_arena_are_refused_with_sizes_and_a_remedy(
    session: TorchSession,
) -> None:
    small = session.slots(1, HEADS)
    with pytest.raises(ArenaFull, match=r"slots of \d+ bytes .*fewer rows"):
        session.slots(2**22, HEADS)
    assert small.rows == 1 and session.slots(2, HEADS).rows == 2


def test_a_finished_step_gives_its_slots_back_without_wait(session: TorchSession) -> None:
    fresh(session, ["a"])
    session.slots(1, HEADS)

    def decode(rows: int) -> None:
        with session.step(["a"], session.slots(rows, HEADS)) as step:
            go_through(step, range(LAYERS), 1)

    (lane,) = session._stepper().lanes
    for number in range(6):
        decode(2**13 + number)
        deadline = time.monotonic() + 20.0
        while not lane.is_idle:  # the engine's word comes some time after the last result
            assert time.monotonic() < deadline
            session._stepper().check()
    decode(1)
    assert session._stepper().lanes == [lane]


def test_slots_made_within_inference_mode_serve_outside_it(session: TorchSession) -> None:
    with torch.inference_mode():
        slots = session.slots(2**12, HEADS)  # in a new arena
    slots.q(0)[:1].copy_(torch.zeros_like(slots.q(0)[:1]))


def test_a_rehearsal_attends_without_a_step_and_steps_follow_it(session: TorchSession) -> None:
    (name,) = fresh(session, ["a"])
    prefill(session, [name], [3])
    slots = decode_slots(session, 1)
    with slots.rehearsal():
        for layer in range(LAYERS):
            slots.o(layer).fill_(7.0)
            assert torch.equal(slots.attend(layer), torch.full_like(slots.o(layer), 7.0))
    assert session.get_sequence(name).length == 3
    for layer in range(LAYERS):
        slots.v(layer).fill_(0.0)
    with session.step([name], slots) as step:
        for layer in range(LAYERS):
            o = step.attend(layer)
    step.wait()
    assert session.get_sequence(name).length == 4
    assert not (o == 7.0).any()


@pytest.mark.gpu
def test_a_caller_captures_its_side_in_a_cuda_graph(tmp_path: Path) -> None:
    if not cuda_devices():
        pytest.skip("no CUDA device")
    with serve("cuda", tmp_path) as running, ignoring_time_slices(), running.session() as session:
        torch.cuda.set_device(running.device)
        names = fresh(session, ["a", "b"])
        prefill(session, names, [16, 31])
        slots = decode_slots(session, 2)
        weights = torch.randn(LAYERS, 64, 64, device=running.device, dtype=torch.float16) / 8
        x = torch.randn(2, HEADS, 64, device=running.device, dtype=torch.float16)
        first = x.clone()

        def layers() -> None:
            for layer in range(LAYERS):
                slots.q(layer).copy_(x @ weights[layer])
                slots.k(layer).copy_(slots.q(layer)[:, :2])
                slots.v(layer).copy_(x[:, :2])
                x.copy_(slots.attend(layer))

        with session.step(names, slots) as step:
            layers()
            step.release_to_engine()
        step.wait()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        twins = fresh(session, ["c", "d"])
        prefill(session, twins, [16, 31])
        results = []
        for batch, run in ((names, graph.replay), (twins, layers)):
            x.copy_(first)
            session.truncate("a", 16)
            session.truncate("b", 31)
            for _ in range(20):
                with session.step(batch, slots) as step:
                    run()
                    step.release_to_engine()
            step.wait()
            torch.cuda.synchronize()
            results.append(x.clone())
        assert session.get_sequence("d").length == 51
        assert torch.equal(*results)


ENGINE_ENDS = """
import os, signal, time, torch, warnings
warnings.simplefilter("ignore", RuntimeWarning)
from tests.session.stepping import *
kind, path, service = sys.argv[1:]
session = Served(kind, path).session()
slots = decode_slots(session, 1)
session.create_sequence("a")
step = session.step(["a"], slots).__enter__()
os.kill(int(service), signal.SIGKILL)
time.sleep(0.5)
fill((slots.q(0),), 3)
step.attend(0)
try:
    torch.cuda.synchronize()
    print("went on", flush=True)
except Exception as error:
    print("raised", flush=True)
os._exit(0)
"""


@pytest.mark.gpu
def test_a_waiting_stream_continues_when_the_engine_ends(tmp_path: Path) -> None:
    if not cuda_devices():
        pytest.skip("no CUDA device")
    path = tmp_path / "engine.sock"
    options = ["--backend.kind", "cuda", "--pool.num-kv-heads", "2", "--pool.head-dim", "64"]
    options += ["--pool.num-layers", "3", "--server.socket", str(path), "--server.port", "0"]
    with subprocess.Popen([sys.executable, "-m", "service", *options], cwd=ROOT) as running:
        while not path.exists():
            time.sleep(0.1)
        with child(ENGINE_ENDS, "cuda", str(path), str(running.pid)) as caller:
            assert caller.stdout is not None
            assert caller.stdout.readline() in ("went on\n", "raised\n")
        assert running.wait() == -signal.SIGKILL


@pytest.mark.gpu
def test_two_sessions_of_one_process_run_on_two_gpus(tmp_path: Path) -> None:
    if cuda_devices() < 2:
        pytest.skip("fewer than two CUDA devices")
    with serve("cuda", tmp_path) as running, ignoring_time_slices(), ExitStack() as stack:
        sessions = [stack.enter_context(running.session(device=number)) for number in (0, 1)]
        results = []
        for current in (0, 1):  # whichever device is current
            torch.cuda.set_device(current)
            for number, session in enumerate(sessions):
                names = fresh(session, [f"{current}-{number}-{row}" for row in "ab"])
                prefill(session, names, [16, 31])
                with session.step(names, decode_slots(session, 2)) as step:
                    results.append(go_through(step, range(LAYERS), 5))
                    assert step.o(0).device.index == number
                step.wait()
        for other in results[1:]:
            for layer in range(LAYERS):
                for got, wanted in zip(other[layer], results[0][layer], strict=True):
                    np.testing.assert_allclose(got, wanted, atol=running.close_enough)
