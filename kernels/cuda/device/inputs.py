"""Inputs of kernels: tensors used in place on the device, or copied there.

Pageable arrays are copied to pinned memory by the CPU, and rounded on the way; pinned arrays go
from their place; device tensors are copied only where a kernel cannot use them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels.backend import Array, Tensor
from kernels.cuda.device.host_memory import direct, pinned_memory
from kernels.cuda.device.staging import Span, stage
from kernels.cuda.device.transfer import Transfers, aligned, serves
from kernels.tensor import DeviceTensor


class Wanted(NamedTuple):
    """Tensors to place contiguously on the device, rounded to `dtype`."""

    tensors: Sequence[Tensor]
    dtype: np.dtype[Any]


class _Piece(NamedTuple):
    """A tensor that is copied to `begin` of the buffer."""

    tensor: Tensor
    dtype: np.dtype[Any]
    begin: int


@dataclass(frozen=True, slots=True, eq=False)
class Uploaded:
    """`at`: the device address of each `Wanted`, valid for the compute stream's next work.

    `copied` is an event that passes when pinned arrays have been read; None where there were none.
    """

    at: list[int]
    copied: Any
    _transfers: Transfers
    _buffer: Any
    _in_place: tuple[DeviceTensor, ...]

    def release(self, event: Any, *others: object) -> None:
        """Hand the tensors, and `others` that the work reads, to the work that is launched.

        They live until `event` has passed, which is recorded behind that work.
        """
        if self._in_place:
            self._transfers.precede(event, self._in_place)
        self._transfers.keep(event, (self._buffer, *self._in_place, *others))


def as_is(*tensors: Tensor) -> list[Wanted]:
    """Each tensor by itself, in its own dtype."""
    return [Wanted((tensor,), tensor.dtype) for tensor in tensors]


def upload(transfers: Transfers, wanted: Sequence[Wanted]) -> Uploaded:
    """Copy tensors to the device where needed; the compute stream waits for the copies."""
    at: list[int] = []
    moved: list[int] = []
    pieces: list[_Piece] = []
    in_place: list[DeviceTensor] = []
    size = 0
    for tensors, dtype in wanted:
        first = tensors[0]
        if len(tensors) == 1 and isinstance(first, DeviceTensor) and serves(first, dtype):
            in_place.append(first)
            at.append(first.address)
            continue
        size = aligned(size)
        moved.append(len(at))
        at.append(size)
        for tensor in tensors:
            if tensor.size:
                pieces.append(_Piece(tensor, dtype, size))
                size += tensor.size * dtype.itemsize
    if in_place:
        transfers.follow(transfers.compute, in_place)
    buffer = copied = None
    if moved:
        buffer = transfers.inbound(size)
        for index in moved:
            at[index] += buffer.ptr
        copied = _send(transfers, buffer, pieces)
    return Uploaded(at, copied, transfers, buffer, tuple(in_place))


def _send(transfers: Transfers, buffer: Any, pieces: Sequence[_Piece]) -> Any:
    """Start all copies; the event that passes when pinned arrays have been read, if there are."""
    owners: list[object] = [buffer]
    spans: list[Span] = []
    staged: list[tuple[Array, np.dtype[Any]]] = []
    across: list[_Piece] = []
    reads_pinned = False
    for number, piece in enumerate(pieces):
        tensor, dtype, begin = piece
        if isinstance(tensor, DeviceTensor):
            across.append(piece)
        elif tensor.dtype == dtype and (pinned := direct(tensor)) is not None:
            transfers.from_pinned(buffer.ptr + begin, pinned)
            owners.append(pinned)
            reads_pinned = True
        else:
            spans.append(Span(number, begin, tensor.size * dtype.itemsize))
            staged.append((tensor, dtype))
    if staged:
        owners.append(_send_staged(transfers, buffer, spans, staged))
    done = _finish(transfers, buffer, across, owners)
    return done if reads_pinned else None


def _send_staged(
    transfers: Transfers,
    buffer: Any,
    spans: Sequence[Span],
    arrays: Sequence[tuple[Array, np.dtype[Any]]],
) -> Any:
    """Copy arrays to pinned memory and from there; the memory."""
    offsets, copies, size = stage(spans)
    host = pinned_memory(size)
    for (array, dtype), offset in zip(arrays, offsets, strict=True):
        np.ndarray(array.shape, dtype, host, offset)[...] = array
    for copy in copies:
        transfers.to_device(buffer.ptr + copy.begin, host.ptr + copy.offset, copy.size)
    return host


def _finish(
    transfers: Transfers, buffer: Any, pieces: Sequence[_Piece], owners: Sequence[object]
) -> Any:
    """Copy device tensors after all others, so that only they wait for the tensors' streams."""
    tensors = [piece.tensor for piece in pieces if isinstance(piece.tensor, DeviceTensor)]
    transfers.follow(transfers.copy_in, tensors)
    for piece, tensor in zip(pieces, tensors, strict=True):
        transfers.across(buffer.ptr + piece.begin, piece.dtype, tensor, transfers.copy_in)
    done = transfers.arrived((*owners, *tensors))
    transfers.precede(done, tensors)
    return done
