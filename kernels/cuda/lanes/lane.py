"""A session's lane on the device: its stream, its arena, and steps that wait there for flags."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.api.driver import CUDADriverError

from kernels.backend import NUMPY_DTYPES, DType, Int32, Plan, Scoring, Unsupported
from kernels.cuda import checks
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.runner import AttentionRunner
from kernels.cuda.attention.steps import DevicePlan
from kernels.cuda.common.structs import EXPAND_PARAMS, POOL_ROWS, TENSOR_ROWS, packed, writer
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.transfer import mark, passed
from kernels.cuda.kv.view import KvView
from kernels.cuda.lanes.flags import Flags
from kernels.cuda.lanes.memory import SIDES, LaneMemory, Outgrown
from kernels.cuda.masks import expand
from kernels.cuda.rows.mover import APPENDED_UNITS, THREADS, append_entry
from kernels.cuda.rows.variants import rows_spec
from kernels.lanes.lane import Owner, StepWork
from kernels.masks import OwnMask

STEP_DTYPES: Final[tuple[DType, ...]] = ("fp16", "bf16")
MOST_GRAPHS: Final = 8
CAPTURE_ERRORS: Final = (runtime.CUDARuntimeError, CUDADriverError)
"""CuPy's own calls raise the first, launches and flags the second."""
ENDING_S: Final = 5.0
RELEASE_S: Final = 0.001
"""Between two releases of a step that is given up: two steps have the same flags."""
SEEN_BEFORE: Final = 2
"""A step is captured the second time it comes: capturing costs more than one step saves."""
_write_pool: Final = writer(POOL_ROWS, "k", "v")
_write_rows: Final = writer(TENSOR_ROWS, "k", "v", base=POOL_ROWS.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Objects that a lane shares with its backend and the other lanes.

    `kvs` has the pages of each group of layers, `places` is as in `PoolGeometry`.
    `compute` is the backend's stream, `aside` one that never waits for a caller.
    """

    kvs: tuple[KvView, ...]
    places: tuple[tuple[int, int], ...]
    library: Library
    multiprocessors: int
    split_keys: int
    guarded: Callable[[], AbstractContextManager[None]]
    compute: Any
    aside: Any

    def kv_at(self, layer: int) -> tuple[KvView, int]:
        """The pages of a layer's group, and the layer's place there."""
        group, at = self.places[layer]
        return self.kvs[group], at


@dataclass(slots=True, eq=False)
class Arena:
    """Device memory that a session's process maps: an allocation outside CuPy's pool, freed with
    its last holder.

    Its IPC handle shows nothing else. `owner` is the last one that it was given to.
    """

    memory: Any
    size: int
    owner: Owner | None = None

    @property
    def address(self) -> int:
        return int(self.memory.ptr)


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A step's plan in place: what attention is given, which of these kinds each layer has.

    New tokens are stored by `append`, or where `inside` by the kernel that reads them. `expand`
    makes the bits of a mask, at the addresses `mask` with the rows' offsets.
    """

    kinds: tuple[tuple[AttentionConfig, DevicePlan], ...]
    which: tuple[int, ...]
    append: Launcher | None = None
    inside: bool = False
    expand: Launcher | None = None
    mask: tuple[int, int] = (0, 0)


class CudaRun:
    """A step on its lane; `done` when its stream has come to its end."""

    def __init__(self, lane: CudaLane, work: StepWork, event: Any) -> None:
        self._lane, self._work, self._event = lane, work, event
        self._done = False

    @property
    def done(self) -> bool:
        if not self._done:
            with self._lane.shared.guarded():
                self._done = passed(self._event)
        return self._done

    def layer(self, layer: int) -> None:
        raise ValueError(f"layer {layer} was called ready: on a device its flag says so")

    has_ready = False

    def advance(self) -> int | None:
        """Nothing: the device runs the layers."""
        return None

    def release(self) -> None:
        with self._lane.shared.guarded():
            flags = self._lane.flags_at(self._work.flags)
            flags.all_ready(self._work.layers)(self._lane.shared.aside.ptr)


class CudaLane:
    """`Lane` on the device: a stream, and the arena of the session that uses it.

    Raises MemoryError where the device has no room for its plans.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.arena: Arena | None = None
        self.address = self.arena_bytes = 0
        self.access: dict[str, Any] = {}
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._memory = LaneMemory(self._stream)
        transfers: Any = self._memory  # as much of it as attention needs
        device = (shared.library, transfers, shared.multiprocessors)
        self._attention = AttentionRunner(*device, shared.split_keys)
        self._mask: Any = None
        self._mask_bytes = 0
        self._flags: dict[int, Flags] = {}
        self._graphs: OrderedDict[object, Any] = OrderedDict()
        """By a step's launches: their graph, or the number of times they were launched."""
        self.captures = True
        self._last: StepWork | None = None
        self._runs: deque[tuple[CudaRun, Any]] = deque()
        """Steps that may not be over, each with the graph that it runs."""

    def use(self, arena: Arena, owner: Owner, access: dict[str, Any]) -> None:
        """Take an arena into use for `owner`, who must not see what others left in it."""
        if arena is not self.arena:
            self._flags.clear()
            self._graphs.clear()
        self.arena, self.access = arena, access
        self.address, self.arena_bytes = arena.address, arena.size
        arena.owner = owner
        self._last = None
        with self.shared.guarded():
            runtime.memsetAsync(self.address, 0, self.arena_bytes, self._stream.ptr)
            self._stream.synchronize()

    def forget(self, arena: Arena) -> None:
        """Hold an arena no longer, whose steps are over."""
        if self.arena is arena:
            self.arena = None
            self._graphs.clear()

    def flags_at(self, offset: int) -> Flags:
        found = self._flags.get(offset)
        if found is None:
            self._flags.clear()
            found = self._flags[offset] = Flags(self.address + offset)
        return found

    def begin(self, work: StepWork) -> CudaRun:
        """Lay the step's plan out, and give the stream all its layers."""
        if work.plan is not None:
            check_work(work, self.shared.kv_at(work.layers[0])[0])
        if self._under_way() >= SIDES:
            raise RuntimeError("a step begins while both sides of the lane are read: this is a bug")
        with self.shared.guarded():
            self._memory.next_side()
            laid = self._lay(work)
            self._stream.wait_event(mark(self.shared.compute))  # earlier appends are done
            self._memory.side.send()
            graph = self._launch(work, laid)
            run = CudaRun(self, work, mark(self._stream))
            self._last = work
            self._runs.append((run, graph))
            return run

    def _under_way(self) -> int:
        """Number of unfinished steps; graphs of finished ones can be released."""
        while self._runs and self._runs[0][0].done:
            self._runs.popleft()
        return len(self._runs)

    @property
    def is_busy(self) -> bool:
        """Whether the stream may be waiting for the caller."""
        return self._under_way() > 0

    def end(self) -> None:
        """Let the steps run through without their caller, for `ENDING_S` at most."""
        ends = time.monotonic() + ENDING_S
        while self.is_busy and time.monotonic() < ends:
            self._runs[0][0].release()
            time.sleep(RELEASE_S)

    def unblock_caller(self) -> None:
        if self._last is not None:
            with self.shared.guarded():
                flags = self.flags_at(self._last.flags)
                flags.all_done(self._last.layers)(self.shared.aside.ptr)

    def clear(self) -> None:
        if self._last is not None:
            with self.shared.guarded():
                flags = self.flags_at(self._last.flags)
                flags.all_unset(self._last.layers)(self.shared.aside.ptr)
                self.shared.aside.synchronize()

    # A step's plan.

    def _lay(self, work: StepWork) -> Laid:
        while True:
            try:
                return self._lay_once(work)
            except Outgrown:
                self._memory.side.restart()

    def _lay_once(self, work: StepWork) -> Laid:
        if work.plan is None or work.rows == 0:
            return Laid((), (0,) * len(work.layers))
        scorings: dict[Scoring, int] = {}
        which = tuple(scorings.setdefault(one, len(scorings)) for one in work.scorings)
        kinds, masked, (kv, _) = [], work.mask is not None, self.shared.kv_at(work.layers[0])
        for scoring in scorings:
            config = AttentionConfig(kv, work.num_qo_heads, dtype_name(work.dtype), scoring, masked)
            device_plan = self._attention.make([(0, work.plan)], config)
            self._attention.partials(device_plan, config.kv)  # no memory is asked for later
            kinds.append((config, device_plan))
        laid = Laid(tuple(kinds), which)
        if work.mask is not None:
            launch, at = self._expand(work.mask, work)
            laid = replace(laid, expand=launch, mask=at)
        if work.append_slots is None:
            return laid
        ends = ends_with(work.plan, work.append_slots, kv.page_size)
        if ends and all(device_plan.appends for _, device_plan in kinds):
            return replace(laid, inside=True)
        return replace(laid, append=self._append(work, work.append_slots))

    def _expand(self, mask: OwnMask, work: StepWork) -> tuple[Launcher, tuple[int, int]]:
        """The launch that makes a mask's bits, and where they and the rows' offsets are.

        The steps of a lane run one after another, so they share the place of the bits.
        """
        words = work.rows * mask.stride
        if 4 * words + expand.PADDING > self._mask_bytes:
            self._mask_bytes = 4 * words + expand.PADDING
            self._mask = self._memory.scratch(self._mask_bytes)
        order, side = None if work.plan is None else work.plan.order, self._memory.side
        struct = packed(
            EXPAND_PARAMS,
            elements=self.address + mask.place,
            rows=side.place(expand.own_rows(mask, order)),
            bits=self._mask.ptr,
            num_rows=work.rows,
            stride=mask.stride,
            packed=mask.packed,
        )
        function = self.shared.library.function(expand.SPEC, expand.ENTRY)
        grid = -(-words // expand.THREADS)
        offsets = side.place(expand.row_offsets(mask, work.rows))
        return Launcher(function, grid, expand.THREADS, 0, struct), (self._mask.ptr, offsets)

    def _append(self, work: StepWork, slots: Int32) -> Launcher:
        """The launch that appends, but for the layer and its tensors."""
        (kv, _), dtype = self.shared.kv_at(work.layers[0]), dtype_name(work.dtype)
        spec = rows_spec(kv.head_dim, dtype, kv.dtype)
        function = self.shared.library.function(spec, append_entry(slots))
        units = work.rows * kv.num_kv_heads * (kv.head_dim // 8)
        struct = packed(POOL_ROWS, **kv.strides, k_scale=kv.k_scale, v_scale=kv.v_scale) + packed(
            TENSOR_ROWS, slots=self._memory.side.place(slots), num_rows=work.rows
        )
        grid = -(-units // (THREADS * APPENDED_UNITS))
        return Launcher(function, grid, THREADS, 0, struct)

    # Its launches.

    def _launch(self, work: StepWork, laid: Laid) -> Any:
        """All layers: by a graph of the same launches, where they came before; the graph or None.

        The graph must live until it has run, although others may take its place in `_graphs`.
        """
        if not self.captures or not laid.kinds:
            self._enqueue(work, laid)
            return None
        key = self._signature(work, laid)
        found = self._graphs.get(key, 0)
        if isinstance(found, int):
            if found + 1 < SEEN_BEFORE:
                self._keep(key, found + 1)
                self._enqueue(work, laid)
                return None
            found = self._capture(work, laid)
            if found is None:
                self._enqueue(work, laid)
                return None
        self._keep(key, found)
        found.launch(self._stream)
        return found

    def _keep(self, key: object, found: Any) -> None:
        self._graphs[key] = found
        self._graphs.move_to_end(key)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture(self, work: StepWork, laid: Laid) -> Any:
        """A graph of the step's launches; None, and no other try, where the driver has none.

        A capture that fails leaves the stream as it was: nothing of it has been launched.
        """
        graph = None
        try:
            self._stream.begin_capture()
            try:
                self._enqueue(work, laid)
            finally:
                graph = self._stream.end_capture()
        except CAPTURE_ERRORS:
            self.captures = False
            return None
        return graph

    def _signature(self, work: StepWork, laid: Laid) -> object:
        """Equal for steps whose launches are the same to the byte."""
        append, expands = (
            None if one is None else one.signature for one in (laid.append, laid.expand)
        )
        attends = tuple(
            (device_plan.signature, self._attention.partials(device_plan, config.kv))
            for config, device_plan in laid.kinds
        )
        where = (work.layers, work.slots, work.flags, work.rows, work.lse_scale, work.sinks)
        kind = (work.num_qo_heads, work.dtype, laid.which, laid.inside)
        return (where, kind, append, expands, laid.mask, attends)

    def _enqueue(self, work: StepWork, laid: Laid) -> None:
        flags, stream = self.flags_at(work.flags), self._stream
        before: int | None = None
        with stream:
            for place, layer in enumerate(work.layers):
                flags.turn(before, layer)(stream.ptr)
                if laid.expand is not None and place == 0:
                    laid.expand()
                if laid.kinds:
                    self._attend(work, laid, layer, laid.kinds[laid.which[place]])
                elif work.plan is None and work.slots:
                    scale(self.address + work.slots[0].lse, 1, 1.0)
                before = layer
            flags.turn(before, None)(stream.ptr)

    def _attend(
        self, work: StepWork, laid: Laid, layer: int, kind: tuple[AttentionConfig, DevicePlan]
    ) -> None:
        """One layer, on the current stream."""
        slot, base = work.slots[layer % len(work.slots)], self.address
        kv, at = self.shared.kv_at(layer)
        if laid.append is not None:
            shift = at * kv.layer_bytes
            _write_pool(laid.append.memory, kv.k + shift, kv.v + shift)
            _write_rows(laid.append.memory, base + slot.k, base + slot.v)
            laid.append()
        config, device_plan = kind
        lse = base + slot.lse
        sinks = work.sinks_at(layer)
        given = (0, 0) if sinks is None else (base + sinks, work.num_qo_heads)
        where = (base + slot.q, base + slot.o, lse)
        new = (base + slot.k, base + slot.v) if laid.inside else (0, 0)
        self._attention.enqueue(device_plan, config, at, where, laid.mask, given, new)
        if work.lse_scale != 1.0:
            scale(lse, work.rows * work.num_qo_heads, work.lse_scale)


def ends_with(plan: Plan, slots: Int32, page_size: int) -> bool:
    """Whether each row of a plan has a segment of its own, whose last key is in the row's slot."""
    if len(plan.levels) != 1 or len(plan.levels[0].kv_start) != len(slots):
        return False
    (level,) = plan.levels
    first, end, last = level.kv_indptr[:-1], level.kv_indptr[1:] - 1, level.kv_last_page_len
    if not (np.diff(level.qo_indptr) == 1).all() or (last < 1).any():
        return False
    position = level.kv_start + (end - first) * page_size + last - 1
    slot = level.kv_indices[end] * page_size + last - 1
    mine = slots if plan.order is None else slots[plan.order]
    return bool((position == plan.positions).all() and (slot == mine).all())


def scale(address: int, count: int, factor: float) -> None:
    """Multiply float32 numbers in place, on CuPy's current stream."""
    memory = cupy.cuda.UnownedMemory(address, 4 * count, None)
    numbers = cupy.ndarray((count,), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    cupy.multiply(numbers, np.float32(factor), out=numbers)


def dtype_name(dtype: np.dtype[Any]) -> DType:
    names: Sequence[DType] = ("fp16", "bf16", "fp32")
    return next(name for name in names if NUMPY_DTYPES[name] == dtype)


def check_work(work: StepWork, kv: KvView) -> None:
    """Check that kernels can use a tensor in place. Raises `Unsupported`."""
    name = dtype_name(work.dtype)
    fitting = STEP_DTYPES
    if kv.dtype in fitting:
        fitting = (kv.dtype,)
    if name not in fitting:
        rule = f"steps on this pool of {kv.dtype} take {' or '.join(fitting)}"
        raise Unsupported("dtype", name, rule)
    if kv.latent or kv.head_dim != kv.v_head_dim:
        rule = f"steps on a device take K and V of one size, as head_dim = {kv.head_dim}"
        raise Unsupported("v_head_dim", kv.v_head_dim, rule)
    checks.check_dims(kv.head_dim, kv.v_head_dim, kv.dtype)
    values = work.rows * max(kv.num_kv_heads, work.num_qo_heads)
    if values * kv.head_dim >= 2**32 or values >= 2**31:
        raise Unsupported("rows", work.rows, "fewer than 2^32 values of q or k at a time")
