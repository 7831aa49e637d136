"""Requests: headers that repeat are checked once, and nothing of one that is over is kept."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from service.engine.loop import reader as requests
from service.image import json_text
from service.operations.table import BY_NAME
from tests.engine.fake_backend import GEOMETRY, FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    creation,
    decode,
    delete,
    engine_test,
    fake_engine,
    gather,
    rows,
    truncate,
    until,
)
from tests.engine.pool_model import on_cpu
from tests.engine.rounds import Rounds
from tests.images import entry, pack


@fake_engine()
async def test_a_header_that_repeats_is_checked_once(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    prepare = requests.prepare

    def counted(operation: Any, *rest: Any) -> Any:
        checked.append(operation.name)
        return prepare(operation, *rest)

    monkeypatch.setattr(requests, "prepare", counted)

    await caller.create("a")
    for seed in range(5):
        reply = await caller.submit(decode("a", seed=seed, new=True))
    assert checked.count("decode") == 1
    await caller.submit(decode("a", layer=1))
    assert checked.count("decode") == 2
    assert np.isfinite(reply.lse).all()


@fake_engine()
async def test_tensors_of_a_remembered_header_are_checked_each_time(caller: Caller) -> None:
    await caller.create("a")
    one = append("a", 1, offsets=[0])
    replies = [await caller.code(one) for _ in range(2)]
    assert replies == ["ok", "length_mismatch"]
    mask = np.ones(2, bool)
    masked = decode("a").but("prefill", qo_indptr=[0, 1], mask=mask[:1])
    assert await caller.code(masked) == "ok"
    broken = np.frombuffer(b"\x02", bool)
    await caller.refused(masked.but(mask=broken), "malformed_body")
    await caller.submit(append("a", 1))
    assert await caller.code(masked) == "invalid_request"
    assert await caller.code(masked.but(mask=mask)) == "ok"


def of_objects(first: str, header_bytes: int) -> NewCall:
    """A creation that fails, whose header is full of small objects."""
    new: list[dict[str, Any]] = [{"parent": first}, *[{}] * (header_bytes // 4)]
    return NewCall("create_sequences", {"sequences": new})


@fake_engine()
async def test_what_is_remembered_of_many_small_objects_is_bounded(caller: Caller) -> None:
    """Each of 3 bytes takes half a kilobyte once it is read."""
    known = caller.engine._reader._known
    few = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "REMEMBERED_WEIGHT", few * 500 * json_text.OBJECT_BYTES)
        for number in range(4 * few):
            await caller.refused(of_objects(f"no{number}", 2000), "answer_too_large")
            objects = sum(len(one.fields.sequences) for one in known.values())
            assert objects <= few * 500
    assert len(known) > few // 2
    assert not any(session.repeated for session in caller.engine.callers.sessions)
    await caller.refused(creation("a", "b").but(sequences=[{"parent": "no"}]), "unknown_sequence")
    assert any(session.repeated for session in caller.engine.callers.sessions)


class Registered(FakeBackend):
    """A backend that reaches all arenas by DMA."""

    def register(self, address: int, size: int) -> bool:
        return True


@engine_test(Registered)
async def test_unaligned_tensors_of_a_repeated_call_in_a_pinned_arena_are_read_again(
    caller: Caller,
) -> None:
    await caller.create("a")
    assert caller.road.pinned_bytes
    fields = json.dumps({"layer": 0, "sequences": ["a"]})
    shapes = {"k": entry([1, 2, 8], 0, 64), "v": entry([1, 2, 8], 64, 128)}
    header = json.dumps({"__metadata__": {"request": fields}} | shapes).encode()
    header += b" " * (1 - len(header) % 4)
    request, answer = caller.road.take(4096), caller.road.take(4096)
    sent = [rows(seed, 1) for seed in range(3)]
    for one in sent:
        image = pack(header, one.tobytes() + one.tobytes())
        request.view(len(image))[:] = image
        reply = await caller.road.call(BY_NAME["append"].number, request, len(image), answer)
        assert reply.status == 200
    stored = await caller.submit(gather("a"))
    assert np.array_equal(stored.tensors["k"], np.concatenate(sent))


@pytest.fixture
def uncollected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Without the garbage collector, and without records that keep tracebacks."""
    gc.collect()
    gc.disable()
    try:
        with caplog.at_level(logging.CRITICAL, logger="attnd.engine"):
            yield
    finally:
        gc.enable()


@pytest.mark.parametrize("slice_ms", [20.0, 1e-6], ids=["whole", "sliced"])
@pytest.mark.parametrize(
    "end", ["ok", "unknown_sequence", "internal", "deadline_exceeded", "cancelled"]
)
def test_no_tensor_of_a_request_that_is_over_is_kept(
    end: str, slice_ms: float, uncollected: None
) -> None:
    rounds = Rounds(slice_s=slice_ms / 1e3)
    rounds.ask(creation({"id": "a"}))
    rounds.run()
    rounds.backend.failures["attend"] = [RuntimeError("a bug")] if end == "internal" else []

    def run(call: NewCall) -> weakref.ref[Any]:
        """A weak reference to the q of a call that is answered."""
        job = rounds.ask(call, -1.0 if end == "deadline_exceeded" else 60.0)
        if end == "cancelled":
            rounds.scheduler.cancel(job)
        rounds.finish()
        return weakref.ref(job.request.tensors["q"])

    q = run(decode("b" if end == "unknown_sequence" else "a", new=True))
    codes = ["ok" if job.error is None else type(job.error).__name__ for job in rounds.answered]
    assert codes[0] == "ok"
    assert (codes[1] == "ok") == (end == "ok"), codes
    del rounds.answered[:], rounds.backend.launches[:]
    assert q() is None, "something still refers to the tensors"


OWN = (
    "service.engine.",
    "service.core.",
    "service.road.engine_end.session",
    "service.road.arena",
    "kernels.",
)


async def live(caller: Caller, name: str) -> None:
    """A session's life: calls that succeed, calls that fail, and pages that outlive it."""
    async with caller.another() as session:
        await session.fill(**{name: 2 * GEOMETRY.page_size})
        await session.submit(decode(name, new=True))
        ids = list(range(GEOMETRY.page_size))
        await session.call("commit", {"id": name, "token_ids": ids})
        for wrong in (truncate(name, 999), decode("missing"), decode(name, offsets=[1], new=True)):
            await session.refused(wrong)
        request, answer = session.road.take(4096), session.road.take(4096)
        image = pack(b"{no JSON", b"")
        request.view(len(image))[:] = image
        number = BY_NAME["append"].number
        assert (await session.road.call(number, request, len(image), answer)).status == 400
        await session.submit(delete(name))


def test_what_sessions_and_their_calls_leave_behind_goes_with_its_last_reference() -> None:
    async def scenario(caller: Caller) -> list[object]:
        await live(caller, "warm")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(3):
                await live(caller, f"s{number}")
            await until(lambda: len(caller.engine.callers.sessions) == 1)
            gc.collect()
            return [one for one in gc.garbage if type(one).__module__.startswith(OWN)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert on_cpu(scenario, GEOMETRY) == []
