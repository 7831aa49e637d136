"""A model runner over one engine and over two: `python -m bench.ranks_caller`, for `bench.ranks`.

Sequences are filled with stretches of one random array, so that what a step must give can be worked
out again in float64. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from attnd import Session
from attnd.torch import RankedTorchSession, TorchSession

from bench.road_caller import Runner

CHUNK: Final = 8192
TIMEOUT_S: Final = 240.0
FILL_ARENA: Final = 256 * 2**20
STEP_ARENA: Final = 16 * 2**20
READ_BYTES: Final = 4 * 2**30


class Keys:
    """What K and V of every sequence and layer are made of: stretches of 2 x CHUNK random rows."""

    def __init__(self, num_kv_heads: int, dim: int) -> None:
        shape = (2, 2 * CHUNK, num_kv_heads, dim)
        self.rows = np.random.default_rng(14).standard_normal(shape).astype(np.float16)

    def stretches(self, name: str, layer: int, kv_len: int) -> Iterator[tuple[int, int, int]]:
        """Where each comes, and the rows that it is."""
        for begin in range(0, kv_len, CHUNK):
            first = (begin // CHUNK * 7919 + 131 * layer + 17 * int(name.lstrip("rw"))) % CHUNK
            yield begin, first, first + min(CHUNK, kv_len - begin)

    def expected(
        self, name: str, layer: int, kv_len: int, q: torch.Tensor, new: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o [Hq, D] and lse [Hq] in float64 for q [Hq, D], over `kv_len` tokens and then `new`, so
        many tokens of one (k, v) [Hkv, D]."""
        count, *one = new
        rows = torch.from_numpy(self.rows).to(q.device)
        heads, dim = q.shape
        group = heads // rows.shape[2]
        scaled = q.double().view(-1, group, dim) * dim**-0.5
        scores, values = [], []
        for _, first, last in self.stretches(name, layer, kv_len):
            k, v = rows[:, first:last].double()
            scores.append(torch.einsum("hgd,khd->hgk", scaled, k))
            top = torch.softmax(scores[-1], -1)
            values.append(torch.einsum("hgk,khd->hgd", top, v))
        k, v = (part.double() for part in one)
        scores.append(torch.einsum("hgd,hd->hg", scaled, k)[..., None] + np.log(count))
        values.append(v[:, None].expand(-1, group, -1))
        lses = torch.stack([torch.logsumexp(part, -1) for part in scores])
        lse = torch.logsumexp(lses, 0)
        o = (torch.exp(lses - lse)[..., None] * torch.stack(values)).sum(0)
        return o.reshape(heads, dim), lse.reshape(heads)


def fill(session: Session, keys: Keys, name: str, layers: int, kv_len: int, is_shard: bool) -> None:
    """Append all tokens at every layer; a shard gets the same as its fellows."""
    for layer in range(layers):
        for begin, first, last in keys.stretches(name, layer, kv_len):
            session.append(
                layer,
                [name],
                keys.rows[0, first:last],
                keys.rows[1, first:last],
                append_indptr=[0, last - first],
                offsets=[begin] if is_shard else None,
            )


def timed(runner: Runner, steps: int) -> dict[str, Any]:
    """Microseconds of a layer, launch by launch and as the caller's graph."""
    return {
        "steps": runner.measure(runner.go_through, steps),
        "graph": runner.measure(runner.captured(), steps),
    }


def error(runner: Runner, keys: Keys, kv_len: int, appended: int) -> dict[str, float]:
    """The last layer of the first and the last sequence against float64."""
    layer, found = runner.layers - 1, {"o": 0.0, "lse": 0.0}
    lse = runner.slots.lse(layer)
    for row in (0, len(runner.names) - 1):
        new = (appended, runner.k[row], runner.v[row])
        o, wanted = keys.expected(runner.names[row], layer, kv_len, runner.q[row], new)
        found["o"] = max(found["o"], float((runner.o[row].double() - o).abs().max()))
        found["lse"] = max(found["lse"], float((lse[row].double() - wanted).abs().max()))
    return found


def read_bytes_per_s(device: torch.device) -> float:
    """What torch reads of this GPU's memory by a sum: the best of some."""
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    taken = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]
        numbers.sum()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e-3)
    return READ_BYTES / min(taken)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Half of the sequences or tokens on one engine, then all of them over the engines."""
    layers, heads, steps = asked.layers, asked.heads, asked.steps
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    keys = Keys(asked.kv_heads, asked.dim)
    names = [f"r{number}" for number in range(asked.batch)]
    half = [f"w{number}" for number in range(asked.half_batch)]
    bandwidth = read_bytes_per_s(device)
    torch.cuda.empty_cache()
    with ExitStack() as stack:
        ranked = stack.enter_context(
            RankedTorchSession(
                asked.sockets, timeout=TIMEOUT_S, device=device, arena_bytes=STEP_ARENA
            )
        )
        one = stack.enter_context(
            TorchSession(asked.sockets[0], timeout=TIMEOUT_S, device=device, arena_bytes=STEP_ARENA)
        )
        writers = [
            stack.enter_context(Session(path, timeout=TIMEOUT_S, arena_bytes=FILL_ARENA))
            for path in asked.sockets
        ]
        for name in names:
            ranked.create_sequence(name)
            for writer in writers:
                fill(writer, keys, name, layers, asked.kv_len, is_shard=True)
        for name in half:
            writers[0].create_sequence(name)
            fill(writers[0], keys, name, layers, asked.half_len, is_shard=False)
        alone = Runner(one, half, heads, layers)
        both = Runner(ranked, names, heads, layers, asked.kv_len)
        runs: dict[str, list[dict[str, Any]]] = {"one": [], "ranked": []}
        for _ in range(asked.repeats):
            runs["one"].append(timed(alone, steps))
            runs["ranked"].append(timed(both, steps))
        appended = 2 * steps * asked.repeats
        found: dict[str, Any] = {
            "read_tb_s": round(bandwidth * 1e-12, 3),
            "placements": [session.placement.kind for session in ranked.sessions],
            "hand_over_us": [round(one.placement.hand_over_us, 2) for one in ranked.sessions],
            "error": error(both, keys, asked.kv_len, appended),
            "error_one": error(alone, keys, asked.half_len, appended),
        }
        for name, every in runs.items():
            found[name] = {
                way: round(median(run[way]["layer_us"] for run in every), 2)
                for way in ("steps", "graph")
            }
        for name in names:
            ranked.delete_sequence(name)
        one.session.delete_sequences(half)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks_caller")
    parser.add_argument("--sockets", nargs="+", required=True)
    numbers = "batch kv-len half-batch half-len heads kv-heads dim layers steps repeats"
    for name in numbers.split():
        parser.add_argument(f"--{name}", type=int, required=True)
    warnings.simplefilter("ignore", RuntimeWarning)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
