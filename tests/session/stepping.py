"""Services that steps run on, with torch tensors of the right kind, and steps made simple."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attnd import Session
from attnd.torch import EmbeddedSession, Slots, Step, TorchSession

from tests.client.running_service import POOL, service
from tests.harness.processes import start

LAYERS = 3
HEADS = 4
"""Query heads; the pool has 2."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Served:
    """A running engine: its backend, and its socket."""

    kind: str
    path: str
    embedded: EmbeddedSession | None = None
    """The session whose process, this one, the engine is in."""

    @property
    def device(self) -> torch.device:
        index = int(os.environ.get("STEP_DEVICE", "0"))
        return torch.device("cuda", index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.kind == "cuda" else torch.float32

    @property
    def close_enough(self) -> float:
        return 2e-3 if self.kind == "cuda" else 1e-6

    def session(self, arena_bytes: int = 2**24, device: Any = None) -> TorchSession:
        return TorchSession(
            self.path, timeout=TIMEOUT_S, arena_bytes=arena_bytes, device=device or self.device
        )


@contextmanager
def serve(kind: str, directory: Path, *arguments: str) -> Iterator[Served]:
    """A service of three layers; its pool poisoned by nothing but what tests write."""
    path = str(directory / "engine.sock")
    options = [f"--{name}={value}" for name, value in options_of(kind, path).items()]
    with service(*options, "--server.port", "0", *arguments):
        yield Served(kind, path)


def options_of(kind: str, path: str) -> dict[str, str]:
    dtype = "fp16" if kind == "cuda" else "fp32"
    pool = {f"pool.{name}": value for name, value in POOL.items()}
    own = {"pool.num-layers": str(LAYERS), "pool.dtype": dtype, "server.socket": path}
    return {"backend.kind": kind, **pool, **own}


@contextmanager
def embed(kind: str, directory: Path) -> Iterator[Served]:
    """The same service with its engine in this process."""
    path = str(directory / "engine.sock")
    settings = options_of(kind, path) | {"log.level": "warning"}
    with EmbeddedSession(settings, 0, timeout=TIMEOUT_S, arena_bytes=2**24) as own:
        yield Served(kind, path, own)


@contextmanager
def session_of(served: Served) -> Iterator[TorchSession]:
    """A session for one test: with an embedded engine its own one, over a new connection."""
    if served.embedded is None:
        with served.session() as made:
            yield made
        return
    road = served.embedded._road
    if road.stepper is not None:
        road.stepper.close()
    if road.connection is not None:
        road.connection.close()
    road.stepper = road.connection = None
    yield served.embedded


def fresh(session: Session, names: Sequence[str], parent: str | None = None) -> list[str]:
    """New sequences by these names."""
    for name in names:
        session.create_sequence(name, parent=parent)
    return list(names)


def fill(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Random numbers that depend on the seed alone."""
    for number, tensor in enumerate(tensors):
        values = np.random.default_rng((seed, number)).standard_normal(tuple(tensor.shape))
        tensor.copy_(torch.from_numpy(values.astype(np.float32)))


def go_through(step: Step, layers: Sequence[int], seed: int) -> dict[int, tuple[Any, Any]]:
    """All layers of a step on random q, k and v; o and lse of each, on the host at the end."""
    kept = {}
    for layer in layers:
        fill((step.q(layer), step.k(layer), step.v(layer)), seed + layer)
        step.attend(layer)
        kept[layer] = (step.o(layer).clone(), step.lse(layer).clone())
    return {layer: (o.float().cpu().numpy(), lse.cpu().numpy()) for layer, (o, lse) in kept.items()}


def inputs(rows: int, layer: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """What `go_through` wrote at a layer, as arrays for the ordinary operations."""
    tensors = [torch.empty(rows, heads, 64, dtype=dtype) for heads in (HEADS, 2, 2)]
    fill(tensors, seed + layer)
    return {name: part.numpy() for name, part in zip("qkv", tensors, strict=True)}


def prefill(
    session: TorchSession, names: Sequence[str], rows: Sequence[int], seed: int = 1
) -> None:
    """Append tokens to each sequence, at every layer."""
    slots = session.slots(sum(rows), HEADS)
    indptr = [0, *np.cumsum(rows).tolist()]
    with session.step(names, slots, qo_indptr=indptr) as step:
        go_through(step, range(LAYERS), seed)
    step.wait()


def decode_slots(session: TorchSession, batch: int) -> Slots:
    return session.slots(batch, HEADS)


def child(source: str, *arguments: str) -> subprocess.Popen[str]:
    """A caller in a process of its own; it prints a line when it has come to its point."""
    head = "import sys\nsys.path[:0] = ['client/src', '.', 'tests']\n"
    return start(head + source, *arguments)
