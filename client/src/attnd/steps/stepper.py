"""`Stepper`: slots and steps of one session, whatever its array library."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar

from attnd.calls.arguments import (
    Indices,
    Int,
    plain_fields,
    sequence_ids,
    whole_number,
    whole_numbers,
)
from attnd.calls.prefix import RowIds, row_ids
from attnd.errors import ArenaFull, Overloaded
from attnd.results import Info
from attnd.road.attempts import microseconds
from attnd.road.connection import Connection
from attnd.steps.lane import Lane
from attnd.steps.layout import A, Dtypes, Shapes
from attnd.steps.slots import Arena, Room, Slots
from attnd.steps.step import Step
from attnd.wire.frames import dump_json

P = ParamSpec("P")
T = TypeVar("T")
SPARE: Final = 2**20


def stepping(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of a session that its stepper carries out."""

    @wraps(method)
    def delegated(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._stepper(), *args, **kwargs)

    return delegated


class Stepper(Generic[A]):
    """One thread's. The first lane is the session's own connection; where slots do not fit while
    others are in use, another connection with a larger arena is opened beside it."""

    def __init__(
        self,
        first: Connection,
        beside: Callable[[int], Connection],
        make_arena: Callable[[Lane[A], int], Arena[A]],
        dtypes: Dtypes,
        info: Info,
        timeout_s: float,
        arena_bytes: int,
    ) -> None:
        self.info = info
        self._beside, self._make_arena = beside, make_arena
        self._dtypes, self._timeout_s = dtypes, timeout_s
        self.lanes = [self._lane(first)]
        self.lanes[0].open(arena_bytes)

    def _lane(self, connection: Connection) -> Lane[A]:
        return Lane(connection, self.info.num_layers, self._timeout_s, self._make_arena)

    @property
    def is_usable(self) -> bool:
        """Whether all connections are open."""
        return all(lane.connection.is_usable for lane in self.lanes)

    def slots(
        self,
        rows: Int,
        num_qo_heads: Int,
        *,
        dtype: Any = None,
        rotation: Int = 1,
        sinks: bool = False,
        mask: bool | Literal["packed"] = False,
    ) -> Slots[A]:
        """Arrays for the layers of steps of up to `rows` rows: keep them, and use them again.

        `dtype` is the pool's, or bf16 where that is fp8. With `rotation` layers take turns in as
        many places, so that one may be written while another is read. With `sinks` there is one
        for each layer and head: see `Slots.sinks`. With `mask` there is one for steps with
        `mask=True`, of bools or of packed bits: see `Slots.mask`. Raises ValueError for a number
        below 1, and `ArenaFull` where the engine gives no more memory.
        """
        rows, num_qo_heads = positive(rows, "rows"), positive(num_qo_heads, "num_qo_heads")
        rotation = positive(rotation, "rotation")
        heads, dim = self.info.num_kv_heads, self.info.head_dim
        chosen = self._dtypes.chosen(dtype, self.info.dtype)
        others: dict[str, tuple[Any, tuple[int, ...]]] = {}
        if sinks:
            others["sinks"] = self._dtypes.float32, (self.info.num_layers, num_qo_heads)
        if mask == "packed":  # many sequences of one row have a byte each
            others["packed_mask"] = self._dtypes.uint8, (max(rows, -(-(rows**2) // 8)),)
        elif mask:
            others["mask"] = self._dtypes.boolean, (rows**2,)
        shapes = Shapes(rows, num_qo_heads, heads, dim, chosen, self._dtypes.float32, others)
        self.check()
        for lane in self.lanes:
            made = None if lane.room is None else lane.room.slots(shapes, rotation)
            if made is not None:
                return made
        needed = shapes.layout(rotation)[-1]
        refusal: Exception | None = None
        for size in (2 * needed + SPARE, needed + SPARE):
            try:
                made = self._larger(size).slots(shapes, rotation)
            except (ArenaFull, Overloaded) as error:
                refusal = error
                continue
            if made is not None:
                return made
        raise full(needed, self.lanes) from refusal

    def _larger(self, size: int) -> Room[A]:
        """An arena with room for `size` bytes: in place of an idle one, or beside the others."""
        for lane in self.lanes:
            if lane.is_idle:
                return lane.open(size)
        lane = self._lane(self._beside(size))
        try:
            room = lane.open(size)
        except BaseException:
            lane.connection.close()
            raise
        self.lanes.append(lane)
        return room

    def step(
        self,
        sequences: Sequence[str],
        slots: Slots[A],
        *,
        layers: Indices | None = None,
        qo_indptr: Indices | None = None,
        causal: bool = True,
        append: bool = True,
        offsets: Indices | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: Int | Indices | None = None,
        lse_base: Literal["e", "2"] = "e",
        cascade: Literal["auto", "always", "never"] = "auto",
        deadline: float | None = None,
        token_ids: RowIds | None = None,
        mask: bool = False,
    ) -> Step[A]:
        """Describe a step to the engine and return at once; the step before may still run.

        Without `qo_indptr` it is a decode, one row for each sequence, else a prefill. `layers` are
        all of the pool's by default. `token_ids` are as in `append`; `known_len` of the step has
        what is known. With `mask`, for a prefill, a row sees of its sequence's rows in this step
        only those that the slots' mask shows, and all earlier keys, as far as `causal` and
        `window_left` allow. Raises the error of an earlier step that was not raised before.
        """
        self.check()
        lane = self._lane_of(slots)
        ids, sums = sequence_ids(sequences), whole_numbers(qo_indptr, "qo_indptr")
        named = whole_numbers(layers, "layers")
        tokens, tokens_of = row_ids(token_ids)
        chosen = tuple(range(self.info.num_layers) if named is None else named)
        rows = sums[-1] if sums else len(ids)
        if rows > slots.rows:
            raise ValueError(f"the step has {rows} rows, its slots have room for {slots.rows}")
        fields: dict[str, Any] = {
            "op": "decode" if sums is None else "prefill",
            "sequences": ids,
            "layers": list(chosen),
            "flags": slots.arena.flags,
            "slots": list(slots.places),
            **slots.others_for(mask),
            "num_qo_heads": slots.num_qo_heads,
            "dtype": self._dtypes.wire[slots.dtype],
            "append": append,
            "logits_soft_cap": logits_soft_cap,
            "window_left": window_left,
            "lse_base": lse_base,
            "cascade": cascade,
            "qo_indptr": sums,
            "causal": None if sums is None else causal,
            "sm_scale": sm_scale,
            "offsets": whole_numbers(offsets, "offsets"),
            "token_ids": None if tokens is None else tokens.tolist(),
            "ids_indptr": tokens_of,
        }
        for other in self.lanes:
            if other is not lane:  # steps of two lanes begin in the order of their description
                other.await_opening()
        return lane.send(
            dump_json(plain_fields(fields)).encode(), slots, chosen, microseconds(deadline)
        )

    def _lane_of(self, slots: Slots[A]) -> Lane[A]:
        for lane in self.lanes:
            if lane.room is not None and lane.room.arena is slots.arena:
                return lane
        raise ValueError(
            "these slots belong to another session, or to a closed connection: make new ones "
            "with this session's slots()"
        )

    def check(self) -> None:
        """Raises the error of a step that was not raised before."""
        for lane in self.lanes:
            lane.check()

    def close(self) -> None:
        """Ends the lanes beside the session's own connection."""
        for number, lane in enumerate(self.lanes):
            if lane.connection.pid != os.getpid():
                continue  # after a fork they are the parent's
            lane.close()
            if number:
                lane.connection.close()


def full(needed: int, lanes: Sequence[Lane[Any]]) -> ArenaFull:
    sizes = [lane.room.size for lane in lanes if lane.room is not None]
    return ArenaFull(
        f"slots of {needed} bytes do not fit the session's arenas of {sizes} bytes, and the engine "
        "gives no more: delete slots that are not needed, or make slots of fewer rows"
    )


def positive(value: Any, field: str) -> int:
    """One int above 0; raises ValueError, and TypeError for other types."""
    number = whole_number(value, field)
    if number < 1:
        raise ValueError(f"{field} is {number}: it must be at least 1")
    return number
