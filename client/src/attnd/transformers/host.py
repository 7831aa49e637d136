"""Forwards over host memory: a `Session`'s arena, written and read in place, or a `Client`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from attnd.client import Client
from attnd.session import Session
from attnd.transformers.roads import Scoring, Step, lay

Array = NDArray[Any]

NUMPY: Final[dict[torch.dtype, Any]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
}
CALL_BYTES: Final = 32 * 2**20
"""Maximum bytes of q, k, v and o in a call; a longer prefill takes several calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """q, k and v of a call, `[tokens, heads, head_dim]`: arrays, and tensors over their memory."""

    arrays: tuple[Array, Array, Array]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Some consecutive tokens of a step: sequence b gets `indptr[b]:indptr[b+1]` of them."""

    sequences: list[str]
    indptr: list[int]
    offsets: list[int]


class HostRoad:
    """One call a layer, or several where a prefill is long. The handle of a step is the step."""

    def __init__(self, control: Session | Client) -> None:
        self.control = control
        self._kept: dict[tuple[Any, ...], Inputs] = {}

    def begin(self, step: Step) -> Step:
        return step

    def end(self, handle: Step) -> None:
        """The appended rows are in the service already."""

    def undo(self, handle: Step) -> None:
        for name, length in zip(handle.sequences, handle.forward.offsets, strict=True):
            self.control.truncate(name, length)

    def wait(self, handle: Step) -> None:
        """Every call has had its answer."""

    def release(self) -> None:
        self._kept.clear()

    def attend(
        self, handle: Step, layer: int, qkv: tuple[torch.Tensor, ...], scoring: Scoring
    ) -> torch.Tensor:
        tokens = handle.forward.tokens
        most = max(1, CALL_BYTES // token_bytes(qkv))
        parts = []
        for begin in range(0, tokens, most):
            end = min(begin + most, tokens)
            inputs = self._inputs(end - begin, qkv)
            for tensor, states in zip(inputs.tensors, qkv, strict=True):
                lay(tensor, states, handle.take, begin)
            parts.append(self._call(layer, inputs.arrays, part_of(handle, begin, end), scoring))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _call(
        self, layer: int, arrays: tuple[Array, Array, Array], part: Part, scoring: Scoring
    ) -> torch.Tensor:
        """Append and attend some of a step's tokens."""
        q, k, v = arrays
        options: dict[str, Any] = {
            "k": k,
            "v": v,
            "offsets": part.offsets,
            "logits_soft_cap": scoring.logits_soft_cap,
            "window_left": scoring.window_left,
        }
        if scoring.sm_scale is not None:
            options["sm_scale"] = scoring.sm_scale
        if scoring.sinks is not None:
            options["sinks"] = np.array(scoring.sinks.detach().float().cpu().numpy())
        if len(part.sequences) == len(q):
            return tensor_over(self.control.decode(layer, part.sequences, q, **options).o)
        indptr, control = part.indptr, self.control
        result = control.prefill(layer, part.sequences, q, indptr, causal=True, **options)
        return tensor_over(result.o)

    def _inputs(self, tokens: int, qkv: tuple[torch.Tensor, ...]) -> Inputs:
        """Room for the inputs of a call: the same for all layers, and for the steps of a decode."""
        dtype = NUMPY[qkv[0].dtype]
        shapes = [(tokens, states.shape[1], states.shape[3]) for states in qkv]
        key = (dtype, *shapes)
        if key not in self._kept:
            self._kept.clear()
            q, k, v = (
                self._empty(name, shape, dtype) for name, shape in zip("qkv", shapes, strict=True)
            )
            tensors = (tensor_over(q), tensor_over(k), tensor_over(v))
            self._kept[key] = Inputs((q, k, v), tensors)
        return self._kept[key]

    def _empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array in the session's arena; of a client's own memory."""
        if isinstance(self.control, Session):
            return self.control.empty(name, shape, dtype)
        return np.empty(shape, dtype)


def part_of(step: Step, begin: int, end: int) -> Part:
    """Tokens `begin:end` of a step; a sequence may have some of its tokens in the part before."""
    forward = step.forward
    if end - begin == forward.tokens:
        return Part(step.sequences, forward.indptr, forward.offsets)
    indptr = np.asarray(forward.indptr)
    cut = indptr.clip(begin, end)
    inside = np.flatnonzero(np.diff(cut))
    offsets = np.asarray(forward.offsets) + (cut - indptr)[:-1]
    return Part(
        [step.sequences[index] for index in inside],
        [0, *(cut[1:][inside] - begin).tolist()],
        offsets[inside].tolist(),
    )


def token_bytes(qkv: tuple[torch.Tensor, ...]) -> int:
    """q, k, v and o of one token."""
    q, k, v = (states.shape[1] * states.shape[3] * states.element_size() for states in qkv)
    return 2 * q + k + v


@torch.inference_mode(False)  # made within it, tensors could be written to only there
def tensor_over(array: Array) -> torch.Tensor:
    """A tensor over the array's memory; torch knows no bfloat16 of numpy's."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
