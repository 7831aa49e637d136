"""`TorchSession`: a session whose steps take and give torch tensors in shared memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from attnd import Session
from attnd.errors import AttndError
from attnd.images import dump_json
from attnd.road import frames
from attnd.road.stepping import StepCall, ask_arena
from attnd.torch.arena import DeviceArena, HostArena, Room, full
from attnd.torch.placement import Placement, find_placement
from attnd.torch.slots import NAMES, Shapes, Slots
from attnd.torch.step import Step
from attnd.torch.watch import Watch

WIRE: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
POOL: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ECHOES: Final = 48
"""Hand-overs that are measured at the start, at least."""


class TorchSession:
    """Steps through the layers of a model whose KV lives in the engine; one thread's.

    On CUDA, `device` may be the engine's GPU or another one that reaches it; nothing but entering a
    step waits on the host. With an engine on the CPU tensors are torch's CPU tensors, and each
    layer waits. `session` has every other operation, in order with the steps.

    `api_key` is as in `Session`. `arena_bytes` hold q, k, v and o of the slots in use. Raises
    `Overloaded` where the engine has no room for another such session.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        port: int = 8080,
        timeout: float = 30.0,
        api_key: str | None = None,
        device: torch.device | str | int | None = None,
        arena_bytes: int = 64 * 2**20,
    ) -> None:
        self.session = Session(path, port=port, timeout=timeout, api_key=api_key)
        self._timeout = timeout
        self._steps: deque[Step] = deque()
        self._open: Step | None = None
        self._watch: Watch | None = None
        self._host_place: object = None
        info = self.session.info()
        self._info = info
        self._connection = self.session._road.connected(self.ends())
        self.device = torch.device("cpu")
        self._wanted_device = device
        self._room = self._open_arena(arena_bytes)
        self.placement: Placement = self._measure()

    def slots(
        self,
        rows: int,
        num_qo_heads: int,
        *,
        dtype: torch.dtype | None = None,
        rotation: int = 1,
    ) -> Slots:
        """Where layers' tensors lie: keep them, and use them for every step of so many rows.

        `dtype` is the pool's, or bf16 where that is fp8. With `rotation` layers take turns in as
        many places, so that one may be written while another is read. Raises `ArenaFull`.
        """
        chosen = dtype or POOL.get(self._info.dtype, torch.bfloat16)
        heads, dim = self._info.num_kv_heads, self._info.head_dim
        shapes = Shapes(rows, num_qo_heads, heads, dim, chosen)
        made = self._room.slots(shapes, rotation)
        if made is None:
            needed = shapes.layout(rotation)[1]
            self.check()  # steps that are over keep their slots
            if self._open is not None and self._open.told:
                self._open = None
            if not self._room.is_free:
                raise full(needed, self._room)
            self._room = self._open_arena(2 * needed + 2**20)
            made = self._room.slots(shapes, rotation)
            if made is None:
                raise full(needed, self._room)
        return made

    def step(
        self,
        sequences: Sequence[str],
        slots: Slots,
        *,
        layers: Sequence[int] | None = None,
        qo_indptr: Sequence[int] | None = None,
        causal: bool = True,
        append: bool = True,
        offsets: Sequence[int] | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int | Sequence[int] = -1,
        lse_base: Literal["e", "2"] = "e",
        cascade: Literal["auto", "always", "never"] = "auto",
        deadline: float | None = None,
    ) -> Step:
        """Describe a step to the engine and return at once; the step before may still run.

        Without `qo_indptr` it is a decode, one row for each sequence, else a prefill. Raises what
        an earlier step ended with that nobody waited for.
        """
        self.check()
        chosen = tuple(range(self._info.num_layers)) if layers is None else tuple(layers)
        fields: dict[str, Any] = {
            "op": "decode" if qo_indptr is None else "prefill",
            "sequences": list(sequences),
            "layers": list(chosen),
            "flags": self._room.arena.flags,
            "slots": list(slots.places),
            "num_qo_heads": slots.num_qo_heads,
            "dtype": WIRE[slots.dtype],
            "append": append,
            "logits_soft_cap": logits_soft_cap,
            "window_left": window_left if isinstance(window_left, int) else list(window_left),
            "lse_base": lse_base,
            "cascade": cascade,
        }
        if qo_indptr is not None:
            fields |= {"qo_indptr": [int(row) for row in qo_indptr], "causal": causal}
        if sm_scale is not None:
            fields["sm_scale"] = sm_scale
        if offsets is not None:
            fields["offsets"] = [int(length) for length in offsets]
        self._check_rows(slots, sequences, qo_indptr)
        return self._send(fields, slots, chosen, deadline)

    def _check_rows(
        self, slots: Slots, sequences: Sequence[str], qo_indptr: Sequence[int] | None
    ) -> None:
        rows = len(sequences) if qo_indptr is None else int(qo_indptr[-1])
        if rows > slots.rows:
            raise ValueError(f"the step has {rows} rows, its slots have room for {slots.rows}")

    def _send(
        self, fields: dict[str, Any], slots: Slots, layers: tuple[int, ...], deadline: float | None
    ) -> Step:
        microseconds = 0
        if deadline is not None:
            microseconds = min(max(1, round(deadline * 1e6)), frames.LONGEST_DEADLINE_US)
        description = dump_json(fields).encode()
        call = self._connection.send_step(description, microseconds, self.ends())
        step = Step(self, call, slots, layers)
        self._steps.append(step)
        return step

    # What steps need of their session.

    def ends(self) -> float:
        return time.monotonic() + self._timeout

    def enter(self, step: Step) -> None:
        self._open = step

    def check(self) -> None:
        """Raises what a step ended with that nobody has been told of."""
        self._connection.is_open()  # reads what has come
        failed: AttndError | None = None
        while self._steps and (self._steps[0].told or self._steps[0].call.is_over):
            step = self._steps.popleft()
            if step.told:
                continue
            try:
                step.call.result(self.ends())
            except AttndError as error:
                failed = failed or error
        if failed is not None:
            self.recover()
            raise failed

    def recover(self) -> None:
        """After an abort: wait for the stream, then have the flags cleared."""
        self._open = None
        if self._connection.broken:
            return
        self._room.arena.settle()
        ask_arena(self._connection, self._room.arena.size, self.ends())

    def _begin_layer(self, layer: int) -> Callable[[], None]:
        """Begin a layer in host memory; what waits for it."""
        if self._open is None:
            raise RuntimeError("attend outside a step: enter one with `with session.step(...)`")
        call = self._open.call
        begun = call.begin_layer(layer, self.ends())
        return lambda: call.wait_layer(layer, begun, self.ends())

    # The arena.

    def _open_arena(self, size: int) -> Room:
        """Ask for an arena, and map it."""
        if self._info.backend != "cuda":
            place = self._connection.take(size)
            self._host_place = place
            memory = torch.frombuffer(self._connection.arena.memory, dtype=torch.uint8)
            ask_arena(self._connection, self._connection.arena.slots.size, self.ends())
            begin = place.offset
            host = HostArena(memory, begin, place.size, self._begin_layer)
            return Room(host, self._info.num_layers)
        self.device = chosen_device(self._wanted_device)
        told = ask_arena(self._connection, size, self.ends())
        self._told = told
        arena = DeviceArena(told, self._info.num_layers, self.device)
        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(self._connection, arena)
        return Room(arena, self._info.num_layers)

    def _measure(self) -> Placement:
        """Hand layers over that compute nothing, and see how long that takes."""
        layers = list(range(self._info.num_layers))
        arena, spare = self._room.arena, self._room.spare
        slot = dict.fromkeys(NAMES, spare)
        fields = {"op": "echo", "layers": layers, "flags": arena.flags, "slots": [slot]}
        number = arena.memory[spare : spare + 4].view(torch.float32)
        best = float("inf")
        for _ in range(2 + ECHOES // len(layers)):
            call = self._echo(fields)
            started = time.perf_counter()
            for layer in layers:
                number.mul_(1.0)  # both ends have a kernel to run: so it is in earnest
                self._hand_echo(call, layer)
            arena.settle()
            best = min(best, (time.perf_counter() - started) / len(layers))
            call.result(self.ends())
        told = {"kind": "host"} if isinstance(arena, HostArena) else self._told
        return find_placement(told, self.device, best * 1e6)

    def _echo(self, fields: dict[str, Any]) -> StepCall:
        call = self._connection.send_step(dump_json(fields).encode(), 0, self.ends())
        call.opened(self.ends())
        return call

    def _hand_echo(self, call: StepCall, layer: int) -> None:
        if isinstance(self._room.arena, HostArena):
            call.run_layer(layer, self.ends())
        else:
            self._room.arena.hand_over(layer)

    def close(self) -> None:
        """End the session; steps that are still open are aborted."""
        if self._watch is not None:
            self._watch.close()
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def chosen_device(device: torch.device | str | int | None) -> torch.device:
    """The caller's GPU, with its number."""
    found = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    )
    if found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
