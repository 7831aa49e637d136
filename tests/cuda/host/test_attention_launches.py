"""From plans to launches without a device: the driver's arguments, call by call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flat_plans import decode_plan, flat_level

pytest.importorskip("cupy")  # which needs no device for what follows

from kernels.backend import Plan, Scoring
from kernels.compile import Spec
from kernels.cuda.attention import runner as runner_module
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.runner import AttentionRunner
from kernels.cuda.attention.steps import write_attend
from kernels.cuda.common.structs import (
    ATTEND_PARAMS,
    MERGE_PARAMS,
    STORED_KV,
    WIDE_PARAMS,
)
from kernels.cuda.device import launch as launch_module
from kernels.cuda.kv.view import KvView
from kernels.cuda.wide import variants

STREAM = 77


@dataclass
class Driver:
    """Keeps the arguments of each launch, the struct as it is at that moment."""

    arch: str = "sm_80"
    overlaps: bool = True
    launches: list[tuple[str, tuple[int, ...], Any]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)

    def function(self, spec: Spec, entry: str, shared_bytes: int = 0) -> Any:
        self.entries.append(entry)
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self.entries) - 1))

    def launchKernel(self, function: int, *settled: int) -> None:
        *shape, stream, where, extra = settled
        assert (stream, extra) == (STREAM, 0)
        self._keep(function, tuple(shape), where)

    def launch_kernel_ex(self, config: int, function: int, where: int, extra: None) -> int:
        """As `cuLaunchKernelEx`, for a `CUlaunchConfig` at an address."""
        shape = tuple((ctypes.c_uint32 * 7).from_address(config))
        assert ctypes.c_uint64.from_address(config + 32).value == STREAM
        self.overlapping.append(self.entries[function])
        self._keep(function, shape, where)
        return 0

    def check_status(self, status: int) -> None:
        assert status == 0

    def _keep(self, function: int, shape: tuple[int, ...], where: int) -> None:
        entry = self.entries[function]
        dtype = MERGE_PARAMS if entry == "merge_states" else ATTEND_PARAMS
        address = ctypes.c_uint64.from_address(where).value
        struct = np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]
        self.launches.append((entry, shape, struct))


class Memory:
    """A fake `Transfers`, whose uploads a test can read back."""

    def __init__(self) -> None:
        self.compute = self._nothing()
        self.uploads: list[np.ndarray[Any, Any]] = []

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def upload_ints(self, arrays: Sequence[Any]) -> tuple[Any, list[int]]:
        whole = np.concatenate(arrays).astype(np.int32)
        self.uploads.append(whole)
        base = whole.ctypes.data
        counts = [len(array) for array in arrays]
        return whole, [base + 4 * at for at in accumulate(counts[:-1], initial=0)]

    def scratch(self, size: int) -> Any:
        return SimpleNamespace(ptr=1 << 40)


def ints_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(int(address)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    stream = SimpleNamespace(ptr=STREAM)
    cuda = SimpleNamespace(
        get_current_stream=lambda: stream, Stream=lambda **_: stream, Event=lambda **_: None
    )
    zeros = SimpleNamespace(data=SimpleNamespace(ptr=5))
    fake = SimpleNamespace(cuda=cuda, zeros=lambda *_: zeros, uint32=np.uint32)
    monkeypatch.setattr(runner_module, "cupy", fake)
    monkeypatch.setattr(launch_module, "cupy", fake)
    monkeypatch.setattr(launch_module, "driver", made)
    monkeypatch.setattr(launch_module, "_launch_kernel_ex", lambda: made.launch_kernel_ex)
    return made


@pytest.fixture
def attention(driver: Driver) -> AttentionRunner:
    return AttentionRunner(driver, Memory(), 132)  # type: ignore[arg-type]


def config() -> AttentionConfig:
    kv = KvView(
        k=1 << 30,
        v=(1 << 30) + 4096,
        layer_bytes=1 << 20,
        layer_rows=1 << 12,
        page_rows=256,
        token_rows=8,
        head_rows=1,
        page_size=16,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        dtype="fp16",
        k_scale=1.0,
        v_scale=1.0,
        num_pages=1 << 16,
        contiguous=False,
        maps=lambda *_: pytest.fail("no wide kernel here"),
    )
    return AttentionConfig(kv, 32, "fp16", Scoring(0.125), False)


def launched(attention: AttentionRunner, driver: Driver, kv_lens: list[int]) -> list[Any]:
    """(entry, shape, struct) of each launch for such a batch, at layer 2."""
    where = config()
    device_plan = attention.make([(2, decode_plan(kv_lens))], where)
    driver.launches.clear()
    attention.enqueue(device_plan, where, 2, (11, 12, 13), (14, 15))
    return driver.launches


def test_a_launch_gets_the_addresses_of_its_call(
    attention: AttentionRunner, driver: Driver
) -> None:
    ((entry, shape, struct),) = launched(attention, driver, [1024] * 256)
    assert entry == "attend_narrow"
    assert [int(struct[name]) for name in ("q", "o", "lse")] == [11, 12, 13]
    assert int(struct["k"]) == (1 << 30) + 2 * (1 << 20)
    assert int(struct["v"]) - int(struct["k"]) == 4096
    assert [int(struct["mask_bits"]), int(struct["mask_row_offsets"])] == [14, 15]
    assert [int(struct[name]) for name in ("partial_o", "partial_lse")] == [0, 0]
    workers, team, threads = int(struct["num_workers"]), int(struct["team"]), shape[3]
    assert shape[0] == -(-workers * team * 8 * 32 // threads)
    assert ints_at(struct["items"], 5) == [0, 0, 4, 0, 1024]
    assert ints_at(struct["worker_begin"], workers + 1)[-1] == 256
    assert ints_at(struct["kv_indices"], 3) == [0, 1, 2]
    assert ints_at(struct["order"], 256) == list(range(256))
    assert ints_at(struct["positions"], 1) == [1023]


def test_a_kernel_with_registers_for_it_stores_new_tokens(
    attention: AttentionRunner, driver: Driver
) -> None:
    where = config()
    masked, capped = where._replace(masked=True), where._replace(scoring=Scoring(0.1, 8.0))
    stored = where._replace(kv=replace(where.kv, dtype="fp8_e4m3"))
    driver.arch = "sm_90a"
    short, long = decode_plan([200] * 16), decode_plan([4096] * 64)
    for given, plan, appends in [
        *((where, short, True), (where, long, False), (masked, short, False)),
        *((capped, short, False), (stored, short, False)),
    ]:
        assert attention.make([(2, plan)], given).appends is appends
    device_plan = attention.make([(2, short)], where)
    driver.launches.clear()
    attention.enqueue(device_plan, where, 2, (11, 12, 13), new=(16, 17))
    ((_, _, struct),) = driver.launches
    assert [int(struct[name]) for name in ("new_k", "new_v")] == [16, 17]


def test_workers_of_one_item_each_need_no_list(attention: AttentionRunner, driver: Driver) -> None:
    ((_, _, struct),) = launched(attention, driver, [4096] * 64)
    assert (int(struct["num_workers"]), int(struct["worker_begin"])) == (64, 0)


@pytest.mark.parametrize(
    ("kv_lens", "chunks"), [([32768], [0]), ([32768, 32768], [0, 1]), ([16, 0], [1])]
)
def test_a_merge_follows_where_rows_have_several_states_or_none(
    attention: AttentionRunner, driver: Driver, kv_lens: list[int], chunks: list[int]
) -> None:
    (_, _, struct), (entry, _, merge) = launched(attention, driver, kv_lens)
    assert entry == "merge_states"
    assert [int(merge[name]) for name in ("o", "lse")] == [12, 13]
    assert int(merge["o_in"]) == int(struct["partial_o"])
    assert int(merge["lse_in"]) == int(struct["partial_lse"])
    assert int(merge["order"]) == int(struct["order"])
    assert int(merge["num_rows"]) == len(chunks)
    assert ints_at(merge["chunks"], len(chunks)) == chunks
    indptr = ints_at(merge["indptr"], len(chunks) + 1)
    rows = int(merge["chunk_rows"])
    members = sorted(ints_at(merge["members"], indptr[-1]))
    assert members == list(range(0, rows * indptr[-1], rows))
    if members:
        floats = (int(merge["lse_in"]) - int(merge["o_in"])) // 4
        assert floats == rows * indptr[-1] * 8 * 128


def test_the_merge_may_start_while_the_kernel_before_it_ends(
    attention: AttentionRunner, driver: Driver
) -> None:
    launched(attention, driver, [32768])
    assert driver.overlapping == ["attend_narrow", "merge_states"]


@pytest.mark.parametrize(
    ("kv_lens", "overlapping"),
    [([128] * 16, ["attend_narrow"]), ([1024] * 64, ["attend_narrow"]), ([4096] * 64, [])],
    ids=["16x128", "64x1k", "64x4k"],
)
def test_a_short_launch_may_start_while_the_call_before_it_ends(
    attention: AttentionRunner, driver: Driver, kv_lens: list[int], overlapping: list[str]
) -> None:
    assert len(launched(attention, driver, kv_lens)) == 1
    assert driver.overlapping == overlapping


def test_a_plan_is_found_again_for_any_layer(attention: AttentionRunner) -> None:
    plan, where = decode_plan([40, 50]), config()
    assert attention.find([(0, plan)], where) is None
    made = attention.make([(0, plan)], where)
    assert attention.find([(3, plan)], where) is made
    assert attention.find([(0, decode_plan([40, 50]))], where) is None
    both = attention.make([(0, plan), (1, plan)], where)
    assert attention.find([(0, plan), (1, plan)], where) is both
    assert attention.find([(1, plan), (1, plan)], where) is None


@pytest.mark.parametrize(
    ("page_size", "rows", "keys", "late"),
    [
        (16, [4000], [4096], 0),
        (5, [40], [400], 1),
        (16, [40, *[1] * 40], [400, *[16] * 40], 1),
        (16, [40, 4000, *[1] * 40], [400, 4096, *[16] * 40], 0),
    ],
    ids=["alone", "pages of any size", "a unit each beside another kernel", "more units"],
)
def test_units_are_taken_late_where_some_ctas_begin_late(
    driver: Driver, page_size: int, rows: list[int], keys: list[int], late: int
) -> None:
    driver.arch = "sm_90a"
    where = config()
    where = where._replace(kv=replace(where.kv, page_size=page_size))
    indptr = np.cumsum([0, *rows]).astype(np.int32)
    level = replace(flat_level(keys, page_size), qo_indptr=indptr)
    plan = Plan((level,), np.repeat(keys, rows).astype(np.int32) - 1)
    made = AttentionRunner(driver, Memory(), 132).make([(0, plan)], where)  # type: ignore[arg-type]
    (wide,) = [s for s in (*made.steps, *made.beside) if s.write is not write_attend]
    base = STORED_KV.itemsize if page_size == 5 else variants.PARAMS_AT
    assert np.frombuffer(wide.launcher.memory, WIDE_PARAMS, 1, base)["late"] == late


def test_few_rows_follow_many_while_these_run(driver: Driver) -> None:
    """With counters of their own, as both take units at the same time."""
    driver.arch = "sm_90a"
    shared, own = flat_level([16384], 16), flat_level([512] * 128, 16)
    shared = replace(shared, qo_indptr=np.array([0, 128], np.int32))
    own = replace(own, kv_start=np.full(128, 16384, np.int32))
    plan = Plan((shared, own), np.full(128, 16895, np.int32))
    attention = AttentionRunner(driver, Memory(), 132, 2048)  # type: ignore[arg-type]
    made = attention.make([(0, plan)], config())
    assert (len(made.steps), made.beside) == (2, ())
    many, few = (
        np.frombuffer(step.launcher.memory, WIDE_PARAMS, 1, variants.PARAMS_AT)[0]
        for step in made.steps
    )
    assert (many["own_units"], few["own_units"]) == (116, 0)
    assert few["schedule"] - many["schedule"] == 8
    grids = [step.launcher.signature[0][1] for step in made.steps]
    assert grids == [116, 264]
    begins_early = [step.launcher.signature[1] for step in made.steps]
    assert begins_early == [False, True]
