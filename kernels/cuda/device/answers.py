"""Answers on their way from kernels: written where they belong on the device, or copied there.

Pinned arrays are written by the device; pageable ones get theirs by the CPU from pinned memory,
where an answer without a place stays; places on the device are written by kernels where they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kernels.backend import AttentionState, Tensor
from kernels.cuda.device.host_memory import direct, pinned_memory
from kernels.cuda.device.staging import Span, stage
from kernels.cuda.device.transfer import Transfers, aligned, mark, serves
from kernels.tensor import DeviceTensor, PinnedArray

FLOAT32: Final = np.dtype(np.float32)


class Goal(NamedTuple):
    """An answer of `shape` and `dtype`, and where it is to go: fresh host memory for None."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: Tensor | None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


class Made(NamedTuple):
    """The contiguous results that a kernel writes as one array of `dtype`."""

    dtype: np.dtype[Any]
    goals: Sequence[Goal]


def states_made(
    states: Iterable[tuple[tuple[int, ...], np.dtype[Any], AttentionState | None]],
    made: np.dtype[Any],
) -> tuple[Made, Made]:
    """o, which kernels write as `made`, and lse; `states` are (shape and dtype of o, place)."""
    o, lse = [], []
    for shape, dtype, place in states:
        o.append(Goal(shape, dtype, None if place is None else place.o))
        lse.append(Goal(shape[:2], FLOAT32, None if place is None else place.lse))
    return Made(made, o), Made(FLOAT32, lse)


class _Piece(NamedTuple):
    """An answer that a kernel writes at a device address, as `made`."""

    goal: Goal
    made: np.dtype[Any]
    address: int

    @property
    def nbytes(self) -> int:
        return self.goal.size * self.made.itemsize


class Answers:
    """Where kernels write (`at`, an address for each `Made`), and the way from there."""

    def __init__(
        self, transfers: Transfers, made: Sequence[Made], at: Sequence[int] | None = None
    ) -> None:
        """Without `at`, kernels write to the places themselves, or to scratch memory."""
        self._transfers = transfers
        self._scratch: Any = None
        self._host: Any = None
        self._offsets: dict[int, int] = {}  # of staged pieces, by their number
        self.at = list(at) if at is not None else self._places(made)
        self._pieces: list[_Piece] = []
        for (dtype, goals), address in zip(made, self.at, strict=True):
            for goal in goals:
                self._pieces.append(_Piece(goal, dtype, address))
                address += goal.size * dtype.itemsize
        self._in_place = [
            piece.goal.place
            for piece in self._pieces
            if isinstance(piece.goal.place, DeviceTensor) and _is_there(piece)
        ]
        transfers.follow(transfers.compute, self._in_place)

    def _places(self, made: Sequence[Made]) -> list[int]:
        at: list[int | None] = []
        offsets, size = [], 0
        for dtype, goals in made:
            place = goals[0].place
            if len(goals) == 1 and isinstance(place, DeviceTensor) and serves(place, dtype):
                at.append(place.address)
                continue
            size = aligned(size)
            at.append(None)
            offsets.append(size)
            size += sum(goal.size for goal in goals) * dtype.itemsize
        if offsets:
            self._scratch = self._transfers.scratch(max(1, size))
        scratch = iter(offsets)
        return [self._scratch.ptr + next(scratch) if a is None else a for a in at]

    def send(self, event: Any, owner: object = None) -> Any:
        """Start the copies after the kernels were launched; `event` is their end.

        `owner` keeps the kernels' output alive, if it is not scratch. Returns the event to await.
        """
        transfers = self._transfers
        transfers.precede(event, self._in_place)
        numbered = [(n, piece) for n, piece in enumerate(self._pieces) if piece.nbytes]
        moved = [(n, piece) for n, piece in numbered if not _is_there(piece)]
        if not moved:
            transfers.keep(event, (owner, *self._in_place))
            return event
        transfers.copy_out.wait_event(event)
        owners: list[object] = [owner, self._scratch, *self._in_place]
        spans: list[Span] = []
        across: list[tuple[_Piece, DeviceTensor]] = []
        for number, piece in moved:
            place = piece.goal.place
            if isinstance(place, DeviceTensor):
                across.append((piece, place))
            elif (pinned := _direct(piece)) is not None:
                transfers.to_pinned(pinned, piece.address)
                owners.append(pinned)
            else:
                spans.append(Span(number, piece.address, piece.nbytes))
        if spans:
            self._stage(spans)
            owners.append(self._host)
        return self._send_across(across, owners)

    def _stage(self, spans: Sequence[Span]) -> None:
        """Copy to pinned memory of our own."""
        offsets, copies, size = stage(spans)
        self._host = pinned_memory(size)
        self._offsets = {span.number: at for span, at in zip(spans, offsets, strict=True)}
        for copy in copies:
            self._transfers.to_host(self._host.ptr + copy.offset, copy.begin, copy.size)

    def _send_across(
        self, pieces: Sequence[tuple[_Piece, DeviceTensor]], owners: Sequence[object]
    ) -> Any:
        """Copy to other places of the device, last, since that waits for the places' streams."""
        transfers, stream = self._transfers, self._transfers.copy_out
        places = [place for _, place in pieces]
        transfers.follow(stream, places)
        for piece, place in pieces:
            source = DeviceTensor(piece.made, piece.goal.shape, piece.address, stream.ptr)
            transfers.across(place.address, place.dtype, source, stream)
        done = mark(stream)
        transfers.keep(done, (*owners, *places))
        transfers.precede(done, places)
        return done

    def take(self) -> list[Tensor]:
        """The answers in the order of all goals, once the awaited event has passed."""
        return [self._take(number, piece) for number, piece in enumerate(self._pieces)]

    def _take(self, number: int, piece: _Piece) -> Tensor:
        (shape, dtype, place), made = piece.goal, piece.made
        offset = self._offsets.get(number)
        if offset is None:
            return np.zeros(shape, dtype) if place is None else place
        staged = np.ndarray(shape, made, self._host, offset)
        if place is None:
            return staged.astype(dtype, copy=False)
        if not isinstance(place, DeviceTensor):
            np.copyto(place, staged, casting="unsafe")
        return place


def _is_there(piece: _Piece) -> bool:
    """Whether the kernel writes the answer to its place."""
    place = piece.goal.place
    return isinstance(place, DeviceTensor) and place.address == piece.address


def _direct(piece: _Piece) -> PinnedArray | None:
    """The piece's place if the device can write the answer there, as it is."""
    place = piece.goal.place
    return direct(place) if place is not None and place.dtype == piece.made else None
