"""Decode steps of sequences that are dealt out over two GPUs: `python -m bench.ranks`.

Each beside half of it on one of them in the same run: half the tokens, or half the sequences. The
caller runs on the first engine's GPU, with an MPS daemon of this run's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from attnd import Session

from bench.machine import RESULTS, provenance, write_results
from bench.road import PACKAGES, placed
from bench.servers import ROOT, Server, attnd
from bench.steps import HEADS, PAGE_SIZE, short

RANKS: Final = 2
LAYERS: Final = 4
STEPS: Final = 40
REPEATS: Final = 3
SPARE_PAGES: Final = 32
"""Of each sequence, for the steps' tokens."""
MILLION: Final = 2**20
SHAPES: Final = (((1, MILLION), (1, MILLION // 2)), ((16, MILLION // 8), (8, MILLION // 8)))
"""Sequences and tokens over the engines, and the half of it."""
MEASURED: Final = ("client/src/attnd/torch", "kernels", "service/core", "service/engine")


def digest_of(folders: Sequence[str]) -> str:
    """Of the sources that the figures are of."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".cu", ".cuh"}:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def pages_of(batch: int, tokens: int) -> int:
    return batch * (tokens // PAGE_SIZE + SPARE_PAGES)


def measure(shapes: Any) -> dict[str, Any]:
    """Every shape, over services that have room for the largest."""
    room = [
        max(
            pages_of(whole[0], whole[1] // RANKS) + (rank == 0) * pages_of(*half)
            for whole, half in shapes
        )
        for rank in range(RANKS)
    ]
    rows = []
    with placed("mps"), ExitStack() as stack:
        servers = [
            stack.enter_context(
                attnd(
                    *HEADS.pool(LAYERS),
                    *("--pool.num-pages", str(pages), "--backend.device", str(rank)),
                    kind="cuda",
                )
            )
            for rank, pages in enumerate(room)
        ]
        with Session(servers[0].socket) as session:
            device = session.info().device
        for whole, half in shapes:
            rows.append(measure_row(servers, whole, half))
            print(json.dumps(rows[-1]), flush=True)
    return {"device": device, "steps": STEPS, "layers": LAYERS, "rows": rows}


def measure_row(
    servers: Sequence[Server], whole: tuple[int, int], half: tuple[int, int]
) -> dict[str, Any]:
    """What `bench.ranks_caller` finds, with the floor: a GPU's KV bytes, read once."""
    numbers = {
        "batch": whole[0],
        "kv-len": whole[1],
        "half-batch": half[0],
        "half-len": half[1],
        "heads": HEADS.num_qo,
        "kv-heads": HEADS.num_kv,
        "dim": HEADS.dim,
        "layers": LAYERS,
        "steps": STEPS,
        "repeats": REPEATS,
    }
    asked = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    sockets = ["--sockets", *(server.socket for server in servers)]
    command = [sys.executable, "-m", "bench.ranks_caller", *asked, *sockets]
    told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    kv_bytes = 2 * 2 * HEADS.num_kv * HEADS.dim * half[0] * half[1]
    read_us = kv_bytes / (found["read_tb_s"] * 1e12) * 1e6
    row: dict[str, Any] = {"batch": whole[0], "kv_len": whole[1], "half": list(half)}
    row |= found | {"floor_us": round(read_us, 1)}
    row["times_half"] = {
        way: round(found["ranked"][way] / found["one"][way], 3) for way in ("steps", "graph")
    }
    return row


def table(results: Mapping[str, Any]) -> str:
    """Both shapes, as Markdown."""
    heads = (
        "over two GPUs",
        "half of it, on one",
        "one: steps, graph µs",
        "two: steps, graph µs",
        "beside the half",
        "floor µs",
        "error of o, lse",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in results["rows"]:
        one, two, times = row["one"], row["ranked"], row["times_half"]
        batch, tokens = row["half"]
        lines.append(
            f"| {row['batch']} x {row['kv_len'] // 1024}k | {batch} x {tokens // 1024}k | "
            f"{one['steps']:.1f}, {one['graph']:.1f} | {two['steps']:.1f}, {two['graph']:.1f} | "
            f"{times['steps']:.3f} x, {times['graph']:.3f} x | {row['floor_us']:.1f} | "
            f"{row['error']['o']:.1e}, {row['error']['lse']:.1e} |"
        )
    told = (
        f"{results['device']}; {results['date'][:10]}; `{results['command']}`; the median step's "
        f"share of a layer: {results['layers']} layers, {HEADS.num_qo}/{HEADS.num_kv} heads of "
        f"{HEADS.dim}, fp16, k and v appended; floor: a GPU's KV at what torch reads in that run."
    )
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results = provenance(PACKAGES) | {"digest": digest_of(MEASURED)} | measure(SHAPES)
    print(f"\n{table(results)}")
    write_results(asked.out or RESULTS / f"ranks-{short(results['device'])}.json", results)


if __name__ == "__main__":
    main()
