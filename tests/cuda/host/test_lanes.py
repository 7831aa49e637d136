"""The lanes of a device that is not there: how many, whose arenas, and captures that fail."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from cupy.cuda import runtime as real_runtime
from cupy_backends.cuda.api.driver import CUDADriverError
from fake_device import FakeDevice
from flat_plans import decode_plan

from config.settings import device_queues
from kernels.backend import PoolGeometry, Scoring
from kernels.cuda.backend import CudaBackend
from kernels.cuda.device import host_memory, transfer
from kernels.cuda.lanes import lane as lane_module
from kernels.cuda.lanes import lanes as lanes_module
from kernels.cuda.lanes import memory as memory_module
from kernels.cuda.lanes import pool as pool_module
from kernels.cuda.lanes.lane import CudaLane, Laid, ends_with
from kernels.cuda.lanes.lanes import CudaLanes, most_lanes
from kernels.cuda.lanes.pool import NewBlock
from kernels.errors import NoMemory
from kernels.lanes.lane import NoRoom, Owner, StepWork

MIB = 1 << 20


class DriverError(CUDADriverError):
    """As the driver's, which must be there to name a real one."""

    def __init__(self) -> None:
        RuntimeError.__init__(self, "not supported")


class FakeBackend(CudaBackend):
    """As much of a backend as lanes ask for."""

    def __init__(self, device: FakeDevice) -> None:
        self._lost = None
        self.transfers = transfer.Transfers()
        self.library = SimpleNamespace(before_load=None)  # type: ignore[assignment]
        self.groups, self._geometry = [], PoolGeometry(2, 1, 1, 1, 64)
        self.multiprocessors = 8
        self._split_keys = 0
        self._page_copies = None
        self.device_memory = device


class Graph:
    """Runs when launched; knows whether it was released before."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.launched = device, 0

    def launch(self, stream: Any) -> None:
        self.launched += 1


class Attention:
    """`AttentionRunner`, which launches nothing, or fails."""

    def __init__(self, *_: Any) -> None:
        self.fails: Exception | None = None
        self.capturing = False
        self.launches = 0

    def partials(self, *_: Any) -> tuple[int, int, int]:
        return 0, 0, 0

    def enqueue(self, *_: Any) -> None:
        self.launches += 1
        if self.capturing and self.fails is not None:
            raise self.fails


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    cuda = made.cupy.cuda
    freed: list[int] = []
    taken: dict[int, int] = {}

    def malloc(size: int) -> int:
        address = 2 * MIB * (len(taken) + 100) * 1000
        taken[address] = size
        return address

    class Memory:
        def __init__(self, size: int) -> None:
            self.ptr = malloc(size)

        def __del__(self) -> None:
            freed.append(self.ptr)

    cuda.Memory = Memory
    made.runtime.ipcGetMemHandle = lambda address: address.to_bytes(8, "little")
    made.runtime.memsetAsync = lambda *_: None
    made.cupy.zeros = lambda *_: SimpleNamespace(data=SimpleNamespace(ptr=1))
    made.cupy.float32 = np.float32
    cuda.Device = lambda *_: SimpleNamespace(id=0)
    cuda.MemoryPool = lambda allocate: SimpleNamespace(malloc=allocate)
    cuda.set_allocator = lambda _: None
    made.freed = freed  # type: ignore[attr-defined]
    for module in (transfer, host_memory, lane_module, lanes_module, memory_module):
        monkeypatch.setattr(module, "cupy", made.cupy)
        if hasattr(module, "runtime"):
            monkeypatch.setattr(module, "runtime", made.runtime)
    monkeypatch.setattr(pool_module, "cupy", made.cupy)
    monkeypatch.setattr(lanes_module, "uuid_of", lambda _: "uuid")
    monkeypatch.setattr(lanes_module, "has_mps", lambda _: False)
    monkeypatch.setattr(lanes_module, "scale", lambda *_: None)
    monkeypatch.setattr(lane_module, "AttentionRunner", Attention)
    return made


def lanes_of(
    device: FakeDevice, most: int = 13, total: int = 64 * MIB, queues: int = 32
) -> CudaLanes:
    return CudaLanes(FakeBackend(device), total, most, queues)


def owner(pid: int, namespace: str = "a") -> Owner:
    return Owner(pid, "1" if pid else "", namespace, 1000)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes that live; the others have ended."""
    pids = {1, 2, 3}
    module = "kernels.lanes.lane.process_start"
    monkeypatch.setattr(module, lambda pid: "1" if pid in pids else "")
    return pids


def opened(lanes: CudaLanes, who: Owner, size: int = 2 * MIB) -> CudaLane:
    return lanes.open(memoryview(b""), size, who)


@pytest.mark.parametrize(("queues", "most"), [("32", 13), ("8", 1), ("4", 0), (None, 1)])
def test_as_many_lanes_as_have_queues_of_their_own(
    monkeypatch: pytest.MonkeyPatch, queues: str | None, most: int
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert most_lanes(device_queues()) == most


def test_lanes_made_are_counted_not_lanes_open(device: FakeDevice, living: set[int]) -> None:
    lanes = lanes_of(device, most=2)
    streams = []
    for pid in (1, 2, 3, 1, 2, 3):
        first, second = opened(lanes, owner(pid)), opened(lanes, owner(pid))
        streams.append(len(device.streams))
        with pytest.raises(NoRoom, match="max_device_sessions"):
            opened(lanes, owner(9))
        lanes.close(first)
        lanes.close(second)
    assert len(set(streams)) == 1, "streams are made only once"


@pytest.mark.parametrize(("num_copy_streams", "most"), [(None, 2), (2, 1)])
def test_no_more_lanes_than_queues_that_copies_of_pages_leave(
    device: FakeDevice,
    living: set[int],
    monkeypatch: pytest.MonkeyPatch,
    num_copy_streams: int | None,
    most: int,
) -> None:
    if num_copy_streams is not None:
        monkeypatch.setattr(FakeBackend, "num_copy_streams", num_copy_streams)
    lanes = lanes_of(device, most=13, queues=10)
    for _ in range(most):
        opened(lanes, owner(1))
    with pytest.raises(NoRoom, match=f"at most {most}"):
        opened(lanes, owner(1))


@pytest.mark.parametrize(
    ("first", "second", "ended", "again"),
    [
        (owner(1), owner(1), False, True),
        (owner(1), owner(2), False, False),
        (owner(1), owner(2), True, True),
        (owner(1), owner(2, "b"), True, False),
        (owner(1), owner(1, "b"), False, False),
        (owner(0), owner(0), False, False),
    ],
    ids=[
        "the same process",
        "another process",
        "another process when the first has ended",
        "another namespace when the first has ended",
        "another namespace of the same process",
        "processes that cannot be seen",
    ],
)
def test_an_arena_is_handed_on_within_a_namespace_to_who_may_have_it(
    device: FakeDevice, living: set[int], first: Owner, second: Owner, ended: bool, again: bool
) -> None:
    lanes = lanes_of(device)
    lane = opened(lanes, first)
    before = lane.address
    lanes.close(lane)
    if ended:
        living.discard(first.pid)
    after = opened(lanes, second)
    assert (after.address == before) is again
    assert after.access["handle"] == after.address.to_bytes(8, "little").hex()


def test_arenas_of_others_who_have_ended_are_freed_when_memory_is_short(
    device: FakeDevice, living: set[int]
) -> None:
    lanes = lanes_of(device, total=4 * MIB)
    for pid in (1, 2):
        lanes.close(opened(lanes, owner(pid, f"of {pid}")))
    with pytest.raises(NoRoom, match="device_arena_bytes"):
        opened(lanes, owner(3))
    living.discard(1)
    opened(lanes, owner(3))
    assert len(device.freed) == 1  # type: ignore[attr-defined]


def test_arenas_of_processes_that_cannot_be_seen_are_never_freed(
    device: FakeDevice, living: set[int]
) -> None:
    lanes = lanes_of(device, total=2 * MIB)
    lanes.close(opened(lanes, owner(0)))
    with pytest.raises(NoRoom, match="device_arena_bytes"):
        opened(lanes, owner(0))
    assert device.freed == []  # type: ignore[attr-defined]


WORK = StepWork((0, 1), (), 0, 1, 4, np.dtype(np.float16), None, None, (Scoring(1.0),) * 2, 1.0)


def capturing_lane(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane whose steps have one kind of attention, on a stream that can be captured."""
    lane: Any = opened(lanes_of(device), owner(1))
    attention, stream = lane._attention, lane._stream
    lane.graphs = []

    def end_capture() -> Graph:
        attention.capturing = False
        lane.graphs.append(Graph(device))
        return lane.graphs[-1]

    stream.begin_capture = lambda: setattr(attention, "capturing", True)
    stream.end_capture = end_capture
    laid = Laid(((SimpleNamespace(kv=None), SimpleNamespace(signature=())),), (0, 0), None)  # type: ignore[arg-type]
    lane.kinds = laid
    monkeypatch.setattr(lane, "_lay", lambda work: lane.kinds)
    monkeypatch.setattr(lane, "_attend", lambda *_: attention.enqueue())
    turn = lambda stream: attention.enqueue()  # noqa: E731
    monkeypatch.setattr(lane, "flags_at", lambda at: SimpleNamespace(turn=lambda *_: turn))
    return lane


@pytest.mark.parametrize("where", ["launch", "begin", "end"])
@pytest.mark.parametrize(
    "error", [DriverError(), real_runtime.CUDARuntimeError(801)], ids=["driver", "runtime"]
)
def test_a_driver_that_cannot_capture_gets_the_launches_themselves(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    lane = capturing_lane(device, monkeypatch)

    def fail() -> None:
        lane._attention.capturing = False
        raise error

    if where == "launch":
        lane._attention.fails = error
    else:
        monkeypatch.setattr(lane._stream, f"{where}_capture", fail)
    runs = []
    for _ in range(4):
        before = lane._attention.launches
        runs.append(lane.begin(WORK))
        assert lane._attention.launches - before >= 5
        device.run()
        assert runs[-1].done
    assert lane.captures is False
    assert lane.shared.guarded.__self__._lost is None, "the device is not lost"


def test_a_graph_lives_until_it_has_run(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    lane = capturing_lane(device, monkeypatch)
    for _ in range(2):
        lane.begin(WORK)
        device.run()
    run = lane.begin(WORK)
    graph = weakref.ref(lane.graphs.pop())
    lane._graphs.clear()  # others have taken its place
    assert graph() is not None
    device.run()
    assert run.done
    assert not lane.is_busy
    assert graph() is None


def test_a_third_step_on_a_lane_is_refused(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = capturing_lane(device, monkeypatch)
    lane.begin(WORK)
    lane.begin(WORK)
    with pytest.raises(RuntimeError, match="this is a bug"):
        lane.begin(WORK)
    device.run()
    lane.begin(WORK)


def test_a_caller_in_this_process_gets_an_arenas_address_also_if_another_had_it(
    device: FakeDevice, living: set[int]
) -> None:
    lanes = lanes_of(device)
    before = opened(lanes, owner(1))
    assert "address" not in before.access
    lanes.close(before)
    living.discard(1)
    after = opened(lanes, owner(os.getpid()))
    assert (after.address, "handle" in after.access) == (after.access["address"], False)
    assert lanes.arena_at(after.address) is after.arena.memory  # type: ignore[union-attr]


@pytest.mark.parametrize("busy", [False, True])
def test_blocks_are_not_freed_while_a_stream_waits_for_its_caller(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    full = real_runtime.CUDARuntimeError(2)

    def no_memory(size: int) -> None:
        raise full

    device.cupy.cuda.Memory = no_memory
    device.cupy.cuda.MemoryPointer = lambda memory, offset: memory
    fake = SimpleNamespace(memGetInfo=lambda: (7, 9), CUDARuntimeError=type(full))
    monkeypatch.setattr(pool_module, "runtime", fake)
    allocate = NewBlock(lambda: not busy)
    with pytest.raises(NoMemory if busy else type(full)) as caught:
        allocate(100)
    if busy:
        assert "try again" in str(caught.value)


@pytest.mark.parametrize("page_size", [1, 5])
def test_new_tokens_are_stored_where_they_are_read_only_if_each_is_its_rows_last_key(
    page_size: int,
) -> None:
    plan = decode_plan([7, 1, 5, 10], page_size)
    (level,) = plan.levels
    last = level.kv_indices[level.kv_indptr[1:] - 1] * page_size + level.kv_last_page_len - 1
    order = np.array([2, 0, 3, 1], np.int32)
    mine = np.empty_like(last)
    mine[order] = last
    empty = decode_plan([7, 0, 5, 10], page_size)
    prefill = replace(level, qo_indptr=np.array([0, 1, 1, 3, 4], np.int32))
    cases = [
        (plan, last, True),
        (replace(plan, order=order), mine, True),
        (replace(plan, order=order), last, False),
        (plan, last - 1, False),
        (plan, np.where(last == last[2], -1, last), False),  # a row is left out
        (plan, last[:3], False),
        (replace(plan, positions=plan.positions - 1), last, False),
        (replace(plan, levels=(level, level)), last, False),
        (replace(plan, levels=(prefill,)), last, False),
        (empty, last, False),
    ]
    for case, slots, wanted in cases:
        assert ends_with(case, slots, page_size) is wanted
