"""What the rows of workloads.json launch, found without a device: kernels, grids, work arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from bench.recorder import MEMORY, Launched, Recorder, recording
from bench.row_plans import (
    Row,
    append_slots,
    config_of,
    merge_indptr,
    pool_plan,
    ragged_row_plan,
)
from kernels.backend import Plan
from kernels.compile import Spec
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.device_plan import DevicePlanBuilder
from kernels.cuda.attention.steps import CallAddresses, Step
from kernels.cuda.kv.pool import pool_view
from kernels.cuda.kv.ragged import ragged_view
from kernels.cuda.merge.merger import Merger
from kernels.cuda.rows.mover import RowMover


@dataclass(frozen=True, slots=True)
class Machine:
    """What of a device decides what is launched there: its architecture, its multiprocessors."""

    arch: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Launches:
    """What one call launches: on its stream, on the stream beside it, and after both."""

    steps: tuple[Launched, ...]
    beside: tuple[Launched, ...] = ()
    after: tuple[Launched, ...] = ()
    partial_rows: int = 0

    @property
    def all(self) -> tuple[Launched, ...]:
        return (*self.steps, *self.beside, *self.after)


@dataclass(frozen=True, slots=True)
class RowLaunches:
    """All that the measurement of a row launches: its call, and a cascade's flat one."""

    row: Row
    calls: tuple[Launches, ...]

    @property
    def work_digest(self) -> str:
        """Digest of the work arrays, grids and parameters, and of the bytes and flops they are for.

        Specialisations are told by `kernels`, device addresses by nothing.
        """
        told: list[object] = [self.row["bytes"], self.row["flops"]]
        for call in self.calls:
            for launches in (call.steps, call.beside, call.after):
                told.append([(x.entry, x.shape, x.attributes, x.values) for x in launches])
            told.append(call.partial_rows)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    @property
    def kernels(self) -> dict[str, Launched]:
        """A launch of every kernel, by the kernel's name."""
        return {kernel_name(x.spec, x.entry): x for call in self.calls for x in call.all}


def kernel_name(spec: Spec, entry: str) -> str:
    """A kernel's entry point and its definitions."""
    options = (option.removeprefix("-D") for option in spec.options)
    return f"{entry}({', '.join(options)})"


def row_launches(row: Row, machine: Machine) -> RowLaunches:
    """What is launched on such a machine to measure a row."""
    with recording(machine.arch) as recorder:
        return RowLaunches(row, tuple(_calls(row, machine, recorder)))


def _calls(row: Row, machine: Machine, recorder: Recorder) -> Iterator[Launches]:
    if row["kind"] == "append":
        yield append_launches(row, recorder)
    elif row["kind"] == "merge":
        yield merge_launches(row, machine, recorder)
    else:
        for flat in (False, True) if row["kind"] == "cascade" else (False,):
            yield attend_launches(*attended(row, flat), machine, recorder)


def attended(row: Row, flat: bool = False) -> tuple[AttentionConfig, Plan]:
    """How an attention row scores, and its plan."""
    if row.get("storage") == "ragged":
        tokens, plan = ragged_row_plan(row)
        shape = (row["num_kv_heads"], row["head_dim"], row["kv_dtype"])
        return config_of(row, ragged_view(*shape, MEMORY, MEMORY, tokens)), plan
    geometry, plan = pool_plan(row, flat)
    return config_of(row, pool_view(geometry, MEMORY)), plan


def attend_launches(
    config: AttentionConfig, plan: Plan, machine: Machine, recorder: Recorder
) -> Launches:
    """An attention call over layer 0."""
    builder = DevicePlanBuilder(config, cast(Any, recorder), machine.multiprocessors, MEMORY)
    device_plan = builder.make([(0, plan)], cast(Any, recorder.memory), None)
    partial = MEMORY if device_plan.partial_rows else 0
    tensors = (MEMORY,) * 5
    call = CallAddresses(0, *tensors, 0, 0, partial_o=partial, partial_lse=partial)
    merges = () if device_plan.merge is None else (device_plan.merge,)

    def launched(steps: Sequence[Step]) -> tuple[Launched, ...]:
        begin = len(recorder.launched)
        for step in steps:
            step.launch(call)
        return tuple(recorder.launched[begin:])

    beside = launched(device_plan.beside)
    return Launches(launched(device_plan.steps), beside, launched(merges), device_plan.partial_rows)


def append_launches(row: Row, recorder: Recorder) -> Launches:
    """A call that appends to layer 0."""
    geometry, slots = append_slots(row)
    memory = recorder.memory
    rows = RowMover(geometry, pool_view(geometry, MEMORY), *_parts(recorder))
    rows.enqueue("append_rows", 0, "fp16", len(slots), (MEMORY, MEMORY, memory.place(slots)))
    return Launches(tuple(recorder.launched))


def merge_launches(row: Row, machine: Machine, recorder: Recorder) -> Launches:
    """A call that merges lists of states."""
    geometry, lists = merge_indptr(row)
    merging = Merger(geometry.head_dim, machine.multiprocessors, *_parts(recorder))
    shape = (row["rows"], row["num_heads"], row["head_dim"])
    members = (MEMORY, MEMORY, recorder.memory.place(lists))
    merging.enqueue(shape, "fp16", members, (MEMORY, MEMORY), row["states"])
    return Launches(tuple(recorder.launched))


def _parts(recorder: Recorder) -> tuple[Any, Any, Any]:
    """Library, transfers, and what guards against a lost device."""
    return recorder, recorder.memory, None
