"""One sequence's KV at two engines: prefilled in chunks and decoded, over HTTP and by steps.

    python examples/split_kv.py                    # two services, HTTP, then steps, on the CPU
    python examples/split_kv.py --backend cuda     # engine i on GPU i; the caller is on GPU 0

Each engine has an ordinary sequence with a part of the tokens. Chunks of the prompt go to the
engines in turn, so both grow evenly. Rows attend at every engine: causally at the one that gets
their k and v, to all keys at the other, whose tokens come before them. The caller merges the two
states (o, lse), which is exact, and compares them with dense attention in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
from attnd import AttentionState, Client, merge_states
from attnd.torch import Slots, Step, TorchSession, merge
from local_service import serve
from numpy.typing import NDArray

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM, PAGE_SIZE = 2, 2, 8, 64, 16
ENGINES, NAME = 2, "long"
DTYPES = {"cpu": ("fp32", np.float32, 1e-5), "cuda": ("fp16", np.float16, 3e-3)}
"""By backend: the pool's dtype, numpy's, and by how much o and lse may differ."""

Rows = NDArray[np.floating]
Chunk = list[tuple[Rows, Rows, Rows]]
"""q, k and v of some rows, at each layer."""
Attend = Callable[[int, Chunk, list[int]], list[AttentionState]]
"""The states of a chunk's rows, by layer; the engine with the number stores its k and v. The list
has the tokens that each engine has before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--decodes", type=int, default=4, help="rows decoded after the prompt")
    given = parser.parse_args()
    pages = -(-(given.tokens + given.decodes) // PAGE_SIZE) + 1
    settings = {
        "pool.num-layers": LAYERS,
        "pool.num-kv-heads": KV_HEADS,
        "pool.head-dim": HEAD_DIM,
        "pool.page-size": PAGE_SIZE,
        "pool.num-pages": pages // ENGINES + given.chunk // PAGE_SIZE + 2,  # of each: half of it
        "pool.dtype": DTYPES[given.backend][0],
        "backend.kind": given.backend,
    }
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(serve({**settings, "backend.device": number * is_cuda}))
            for number in range(ENGINES)
            for is_cuda in [given.backend == "cuda"]
        ]
        clients = [stack.enter_context(Client(uds=one)) for one in sockets]
        pool = stack.enter_context(ThreadPoolExecutor(ENGINES))
        run("HTTP", over_http(clients, pool), given)
        for client in clients:
            client.delete_sequence(NAME)
        roads = [f"{one}.road" for one in sockets]
        sessions = [stack.enter_context(TorchSession(road)) for road in roads]
        run("steps", by_steps(sessions, given.chunk), given)


def run(way: str, attend: Attend, given: argparse.Namespace) -> None:
    """Prefill a prompt in chunks and decode; SystemExit if a state is wrong."""
    _, dtype, bound = DTYPES[given.backend]
    rng = np.random.default_rng(1)

    def rows(count: int, heads: int) -> Rows:
        return rng.standard_normal((count, heads, HEAD_DIM)).astype(dtype)

    sizes = [given.chunk] * (given.tokens // given.chunk) + [given.tokens % given.chunk]
    sizes = [size for size in sizes if size] + [1] * given.decodes
    held, keys, error, seconds = [0] * ENGINES, [(rows(0, KV_HEADS),) * 2] * LAYERS, 0.0, 0.0
    for count in sizes:
        chunk = [
            (rows(count, QUERY_HEADS), rows(count, KV_HEADS), rows(count, KV_HEADS))
            for _ in range(LAYERS)
        ]
        keys = [
            (np.concatenate((old_k, k)), np.concatenate((old_v, v)))
            for (old_k, old_v), (_, k, v) in zip(keys, chunk, strict=True)
        ]
        turn = held.index(min(held))  # the engine with the fewest tokens stores the chunk
        begun = time.perf_counter()
        states = attend(turn, chunk, held)
        seconds += time.perf_counter() - begun
        held[turn] += count
        for (q, _, _), (k, v), state in zip(chunk, keys, states, strict=True):
            error = max(error, worst(state, q, k, v))
    print(f"{way}: {held[0]} + {held[1]} tokens, {len(sizes)} calls in {seconds:.3f} s, ", end="")
    print(f"o and lse differ from dense float64 by at most {error:.1e}")
    if not error <= bound:  # nor may it be NaN
        raise SystemExit(f"FAILED: they may differ by {bound:g}")


def over_http(clients: list[Client], pool: ThreadPoolExecutor) -> Attend:
    """One call for each engine and layer, both at the same time."""
    for client in clients:
        client.create_sequence(NAME)

    def attend(turn: int, chunk: Chunk, held: list[int]) -> list[AttentionState]:
        def ask(number: int, layer: int) -> AttentionState:
            q, k, v = chunk[layer]
            new = {"k": k, "v": v} if number == turn else {}
            reply = clients[number].prefill(
                layer,
                [NAME],
                q,
                qo_indptr=[0, len(q)],
                causal=number == turn,
                offsets=[held[number]],
                **new,
            )
            return reply.state

        return [
            merge_states(list(pool.map(ask, range(ENGINES), [layer] * ENGINES)))
            for layer in range(LAYERS)
        ]

    return attend


def by_steps(sessions: list[TorchSession], most_rows: int) -> Attend:
    """One step at each engine. A stream for each lets both attend a layer at the same time."""
    device = sessions[0].device
    is_cuda = device.type == "cuda"
    slots = [one.slots(most_rows, QUERY_HEADS, rotation=LAYERS) for one in sessions]
    streams = [torch.cuda.Stream(device) for _ in sessions] if is_cuda else []
    for session in sessions:
        session.create_sequence(NAME)

    def attend_layer(steps: list[Step[torch.Tensor]], layer: int) -> None:
        """Each engine's state of a layer; later work of the current stream finds them."""
        if not is_cuda:
            for step in steps:
                step.attend(layer)  # waits for it
            return
        current = torch.cuda.current_stream(device)
        for stream, step in zip(streams, steps, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                step.attend(layer)
        for stream in streams:
            current.wait_stream(stream)

    def attend(turn: int, chunk: Chunk, held: list[int]) -> list[AttentionState]:
        count, states = len(chunk[0][0]), []
        with ExitStack() as opened:
            steps = [
                opened.enter_context(
                    session.step(
                        [NAME],
                        slots[number],
                        qo_indptr=[0, count],
                        causal=number == turn,
                        append=number == turn,
                        offsets=[held[number]],
                    )
                )
                for number, session in enumerate(sessions)
            ]
            for layer, given in enumerate(chunk):
                write(slots, layer, given)
                attend_layer(steps, layer)
                parts = [(one.o(layer)[:count], one.lse(layer)[:count]) for one in slots]
                o, lse = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
                merge(parts, o, lse)
                states.append((o, lse))
        for step in steps:
            step.wait()
        return [AttentionState(o.cpu().numpy(), lse.cpu().numpy()) for o, lse in states]

    return attend


def write(slots: list[Slots[torch.Tensor]], layer: int, given: tuple[Rows, Rows, Rows]) -> None:
    """A layer's q, k and v into the slots; an engine that does not append ignores k and v."""
    for one in slots:
        tensors = one.tensors(layer)
        for tensor, array in zip((tensors.q, tensors.k, tensors.v), given, strict=True):
            tensor[: len(array)].copy_(torch.from_numpy(array))


def worst(state: AttentionState, q: Rows, k: Rows, v: Rows) -> float:
    """The largest difference from dense float64, over some rows at both ends of a chunk."""
    some = np.unique(np.clip([0, 1, 2, -3, -2, -1], -len(q), len(q) - 1) % len(q))
    expected = dense(q[some], k, v, len(k) - len(q) + some)
    o, lse = state.o[some] - expected.o, state.lse[some] - expected.lse
    return float(max(np.abs(o).max(), np.abs(lse).max()))


def dense(q: Rows, k: Rows, v: Rows, positions: NDArray[np.int64]) -> AttentionState:
    """The states of rows at some positions, causally and in float64."""
    group = QUERY_HEADS // KV_HEADS
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->qhk", q.astype(np.float64), keys) * HEAD_DIM**-0.5
    ahead = np.arange(len(k)) > positions[:, None]
    scores = np.where(ahead[:, None], -np.inf, scores)
    lse = np.logaddexp.reduce(scores, axis=-1)
    o = np.einsum("qhk,khd->qhd", np.exp(scores - lse[..., None]), values)
    return AttentionState(o, lse.astype(np.float32))


if __name__ == "__main__":
    main()
