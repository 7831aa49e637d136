"""A model runner's steps by TorchSession: `python -m bench.driver.torch_steps`.

Fills sequences by prefill steps, then decodes. A layer copies q, k and v into its slots and o out
of them, as a model's projections would write and read them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from attnd.torch import EmbeddedSession, Step, TorchSession

CHUNK: Final = 1024
FILLED_AT_ONCE: Final = 8
WARM_STEPS: Final = 8
ON_DEVICE: Final = {"backend.kind": "cuda", "server.device-arena-bytes": 4 * 2**30}


class Runner:
    """Decode steps of a batch, on the model's own tensors."""

    def __init__(self, session: TorchSession, names: list[str], heads: int, layers: int) -> None:
        self.session, self.names, self.layers = session, names, layers
        self.slots: Any = session.slots(len(names), heads, rotation=2)
        self.q, self.k, self.v = (
            torch.randn(part.shape, device=session.device, dtype=torch.float32).to(part.dtype)
            for part in (self.slots.q(0), self.slots.k(0), self.slots.v(0))
        )
        self.o = torch.zeros_like(self.q)

    def step(self) -> Step[torch.Tensor]:
        """Describe the next step to the engine."""
        return self.session.step(self.names, self.slots)

    def run_layers(self) -> None:
        """All layers, on the current stream."""
        for layer in range(self.layers):
            self.slots.q(layer).copy_(self.q)
            self.slots.k(layer).copy_(self.k)
            self.slots.v(layer).copy_(self.v)
            self.o.copy_(self.slots.attend(layer))

    def measure(self, run: Callable[[], None], steps: int) -> dict[str, float]:
        """Microseconds of a layer by the device's clock; each step is described one ahead."""
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        ahead = self.step()
        host, last = 0.0, ahead
        events[0].record()
        for number in range(steps):
            started = time.perf_counter()
            with ahead as step:
                if number + 1 < steps:
                    ahead = self.step()
                run()
                step.release_to_engine()
            last = step
            host += time.perf_counter() - started
            events[number + 1].record()
        last.wait()
        torch.cuda.synchronize()
        pairs = zip(events[WARM_STEPS:], events[WARM_STEPS + 1 :], strict=False)
        taken = [begin.elapsed_time(end) / self.layers * 1e3 for begin, end in pairs]
        return {
            "layer_us": round(median(taken), 2),
            "layer_p90_us": round(float(np.percentile(taken, 90)), 2),
            "host_us": round(host / steps / self.layers * 1e6, 2),
        }

    def captured(self) -> Callable[[], None]:
        """`run_layers`, as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run_layers()
        return graph.replay

    def error(self) -> float:
        """The largest difference of the last layer's o from `decode` over the same tokens."""
        reply = self.session.decode(self.layers - 1, self.names, self.q.cpu().numpy())
        return float(np.abs(reply.o.astype(np.float32) - self.o.float().cpu().numpy()).max())


def fill(session: TorchSession, names: list[str], heads: int, layers: int, kv_len: int) -> None:
    """Fill sequences with random tokens by prefill steps."""
    some = min(FILLED_AT_ONCE, len(names))
    chunk = min(CHUNK, kv_len)
    slots = session.slots(some * chunk, heads)
    for tensor in (slots.q(0), slots.k(0), slots.v(0)):
        tensor.normal_()
    for first in range(0, len(names), some):
        for _ in range(kv_len // chunk):
            indptr = list(range(0, some * chunk + 1, chunk))
            with session.step(names[first : first + some], slots, qo_indptr=indptr) as step:
                for layer in range(layers):
                    step.attend(layer)
    step.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.driver.torch_steps")
    parser.add_argument("--socket")
    help_of_embedded = "an engine in this process in place of a socket's; its settings follow"
    parser.add_argument("--embedded", nargs=argparse.REMAINDER, help=help_of_embedded)
    for name in ("device", "batch", "kv-len", "heads", "layers", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    chosen = parser.parse_args()
    names = [f"s{number}" for number in range(chosen.batch)]
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.cuda.set_device(chosen.device)
    options: dict[str, Any] = {"device": chosen.device, "arena_bytes": 256 * 2**20}
    if chosen.embedded is None:
        made = TorchSession(chosen.socket, timeout=120.0, **options)
    else:
        words = iter(word.removeprefix("--") for word in chosen.embedded)
        settings: dict[str, object] = {**dict(zip(words, words, strict=True)), **ON_DEVICE}
        settings["backend.device"] = options.pop("device")
        made = EmbeddedSession(settings, timeout=120.0, **options)
    with made as session:
        for name in names:
            session.create_sequence(name)
        fill(session, names, chosen.heads, chosen.layers, chosen.kv_len)
        runner = Runner(session, names, chosen.heads, chosen.layers)
        found: dict[str, Any] = {
            "placement": session.placement.kind,
            "device": session.info().device,
            "hand_over_us": round(session.placement.hand_over_us, 2),
            "steps": runner.measure(runner.run_layers, chosen.steps),
            "graph": runner.measure(runner.captured(), chosen.steps),
        }
        found["error"] = runner.error()
        for name in names:
            session.truncate(name, chosen.kv_len)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
