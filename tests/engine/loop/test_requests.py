"""Requests: headers that repeat are checked once, and nothing of one that is over is kept."""

from __future__ import annotations

import gc
import json
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from config.settings import Settings
from kernels.lanes.host_lanes import HostLanes
from service.engine.loop import request as requests
from service.engine.loop.job import Job
from service.engine.loop.request import AnswerPlace, Request
from service.engine.loop.scheduler import Scheduler
from service.engine.store.pace import DevicePace
from service.engine.store.setup import make_info
from service.engine.store.store import Store
from service.metrics import Metrics
from service.operations.schema.spec import validate
from service.operations.table import BY_NAME
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import (
    Caller,
    admit,
    append,
    decode,
    engine_test,
    fake_engine,
    gather,
    rows,
    run_round,
)
from tests.images import entry, pack


@fake_engine()
async def test_a_header_that_repeats_is_checked_once(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    preparing = requests.preparing

    def counted(operation: Any, *rest: Any) -> Any:
        checked.append(operation.name)
        return preparing(operation, *rest)

    monkeypatch.setattr(requests, "preparing", counted)

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
    backend = FakeBackend()
    info = make_info(backend, Settings())
    store = Store(backend, DevicePace(4e9, 2e10, slice_ms / 1e3), info)
    answered: list[Job] = []
    scheduler = Scheduler(store, Metrics(), answered.append, HostLanes(store.backend))

    def ask(name: str, fields: dict[str, Any], **tensors: Any) -> Job:
        operation = BY_NAME[name]
        request = Request(operation, validate(operation.fields, fields), tensors, AnswerPlace())
        now = time.monotonic()
        late = name == "decode" and end == "deadline_exceeded"
        return Job(request, None, now, now - 1 if late else now + 60)

    def run(job: Job) -> weakref.ref[Any]:
        """A weak reference to the job's q, when the job is answered."""
        admit(scheduler, job)
        if end == "cancelled" and job.request.operation.name == "decode":
            scheduler.cancel(job)
        while scheduler.is_busy:
            run_round(scheduler)
        return weakref.ref(job.request.tensors.get("q", answered))  # type: ignore[arg-type]

    admit(scheduler, ask("create_sequences", {"sequences": [{"id": "a"}]}))
    run_round(scheduler)
    backend.failures["attend"] = [RuntimeError("a bug")] if end == "internal" else []
    call = decode("b" if end == "unknown_sequence" else "a", new=True)
    q = run(ask(call.name, call.fields, **call.tensors))
    codes = ["ok" if job.error is None else type(job.error).__name__ for job in answered]
    assert codes[0] == "ok"
    assert (codes[1] == "ok") == (end == "ok"), codes
    del answered[:], backend.launches[:], call
    assert q() is None, "something still refers to the tensors"
