"""Decodes of a model replayed as one CUDA graph, with their hand-overs inside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnd.transformers.batch import Batch, Shape
from attnd.transformers.device import DeviceRoad, Recording
from attnd.transformers.releases import CACHE
from attnd.transformers.roads import Step, outside_graphs

Forward = Callable[..., Any]

OF_A_DECODE: Final = {
    *("input_ids", "position_ids", CACHE, "attention_mask"),
    *("use_cache", "return_dict", "logits_to_keep"),
}
"""What `generate` gives a model for a decode; with anything else it is not captured."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured decode: fill `ids` and `positions`, `replay`, and read `output`."""

    ids: torch.Tensor
    positions: torch.Tensor
    replay: Callable[[], None]
    output: list[torch.Tensor]
    recording: Recording


@dataclass(slots=True, eq=False)
class Decodes:
    """Takes a model's forwards: decodes of a cache are replayed, all else is the model's own.

    The first decode of a number of rows runs as it is and warms up, the second is captured. Where
    that is refused, decodes go on as they are, with a warning.
    """

    model: Any
    batch: Batch
    road: DeviceRoad
    graphs: dict[int, Graph | None] = field(default_factory=dict)
    replayed: int = 0
    refused: bool = False

    def run(self, forward: Forward, cache: object, inputs: dict[str, Any]) -> Any:
        latest = self.batch.latest
        if latest is None or not is_decode(cache, inputs):
            return forward(**inputs)
        if reason := obstacle(inputs):
            warn(reason)
            return forward(**inputs)
        ids = inputs["input_ids"]
        shape = Shape(len(ids), 1, latest.num_qo_heads, ids.device)
        try:
            step = self.batch.begin(shape, inputs.get("attention_mask"), latest.scoring)
            graph = self._graph(step, forward, inputs) if step.take is None else None
            if graph is None:
                return forward(**inputs)  # which continues the step
            graph.ids.copy_(ids)
            graph.positions.copy_(inputs["position_ids"])
            graph.replay()
            self.road.replayed(self.batch.handle)
            self.batch.complete()
        except BaseException:
            self.batch.abort()
            raise
        self.replayed += 1
        return CausalLMOutputWithPast(logits=graph.output[0], **{CACHE: cache})

    def _graph(self, step: Step, forward: Forward, inputs: dict[str, Any]) -> Graph | None:
        """The graph of such a decode; None for the first one."""
        rows = len(inputs["input_ids"])
        known = self.graphs.get(rows)
        if known is not None and known.recording.slots is not None:
            return known
        if self.refused or rows not in self.graphs:
            self.graphs[rows] = None
            return None
        try:
            self.graphs[rows] = self._capture(step, forward, inputs)
        except RuntimeError as error:
            self.refused = True
            warn(str(error))
        return self.graphs[rows]

    def _capture(self, step: Step, forward: Forward, inputs: dict[str, Any]) -> Graph:
        recording = self.road.record(step)
        fixed = dict(inputs, attention_mask=None)
        ids = fixed["input_ids"] = inputs["input_ids"].clone()
        positions = fixed["position_ids"] = inputs["position_ids"].clone()
        output: list[torch.Tensor] = []

        def run() -> None:
            self.batch.recorder = recording.attend
            try:
                output[:] = [forward(**fixed).logits]
            finally:
                self.batch.recorder = None

        return Graph(ids, positions, graph_of(run, ids.device), output, recording)


def warn(reason: str) -> None:
    message = f"the model's decode cannot be captured, so it runs as it is: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def is_decode(cache: object, inputs: dict[str, Any]) -> bool:
    """Whether these are the inputs of one more token for every row of the cache."""
    ids = inputs.get("input_ids")
    return any(one is cache for one in inputs.values()) and ids is not None and ids.shape[1] == 1


def obstacle(inputs: dict[str, Any]) -> str:
    """Why a decode with these inputs is not captured; empty if it is."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    others = [name for name, value in inputs.items() if not (value is None or name in OF_A_DECODE)]
    if others or inputs.get("return_dict") is False:
        return f"its inputs include {', '.join(others) or 'return_dict=False'}"
    if positions is None or positions.shape != inputs["input_ids"].shape:
        return "its inputs lack position_ids of the shape of input_ids"
    return "" if mask is None or mask.ndim == 2 else "its attention_mask is not [rows, columns]"


def graph_of(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What repeats the work of `run` on the device; on a CPU `run` itself."""
    if device.type != "cuda":
        return run
    with torch.cuda.device(device):  # and a stream of it: torch's own is the first device's
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # torch.cuda.graph waits for the device: for open steps, too
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    replay: Callable[[], None] = graph.replay
    return replay


@contextmanager
def replaying(cache: object, decodes: Decodes) -> Iterator[Decodes]:
    """While this lasts, the model's decodes over the cache are replayed."""
    model = decodes.model
    forward = model.forward

    @outside_graphs
    @wraps(forward)
    def run(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **inputs) if args else decodes.run(forward, cache, inputs)

    replaced = vars(model).get("forward")  # of a wrapper that was there before
    model.forward = run
    try:
        yield decodes
    finally:
        del model.forward
        if replaced is not None:
            model.forward = replaced
