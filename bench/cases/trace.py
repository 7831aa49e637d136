"""Traces of prompts: read, generated, split and multiplied."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt of `blocks`, at `at` seconds, that gets `output` tokens.

    Equal block numbers mean equal prompts up to there. The prompt has `tokens` tokens; its last
    block may be short.
    """

    at: float
    blocks: tuple[int, ...]
    tokens: int
    output: int


def trace_of(path: Path | None, count: int) -> list[TraceRequest]:
    """The requests of a file, or `count` generated ones; ends the program where there are none."""
    try:
        requests = generated_trace(count) if path is None else read_trace(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{path} is no trace: {error!r}") from error
    if not requests:
        raise SystemExit(f"{path} has no requests with prompts")
    return requests


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file in the format of Mooncake's published traces, in order."""
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    return [
        TraceRequest(
            one["timestamp"] / 1e3,
            tuple(one["hash_ids"]),
            max(1, min(one["input_length"], len(one["hash_ids"]) * BLOCK_TOKENS)),
            max(1, one["output_length"]),
        )
        for one in records
        if one["hash_ids"]
    ]


def generated_trace(
    count: int, seed: int = 0, per_s: float = 4.0, families: int = 40
) -> list[TraceRequest]:
    """Growing chats: each request continues one of `families`, or starts it again."""
    rng = np.random.default_rng(seed)
    chats: dict[int, list[int]] = {}
    next_block, at, made = 0, 0.0, []
    for _ in range(count):
        at += float(rng.exponential(1 / per_s))
        family = int(rng.integers(families))
        if family not in chats or len(chats[family]) > 60:
            chats[family] = []
        grown = int(rng.geometric(0.15))
        chats[family] = chats[family] + list(range(next_block, next_block + grown))
        next_block += grown
        blocks = tuple(chats[family])
        tokens = len(blocks) * BLOCK_TOKENS - int(rng.integers(BLOCK_TOKENS))
        made.append(TraceRequest(at, blocks, tokens, 1 + int(rng.geometric(1 / 150))))
    return made


def token_ids(pages: NDArray[np.int64], page_size: int) -> NDArray[np.uint32]:
    """Token ids that are unique to these pages."""
    ids = (pages[:, np.newaxis] * page_size + np.arange(page_size)) % (1 << 32)
    return ids.astype(np.uint32).ravel()


def shortened(requests: Iterable[TraceRequest], longest: int) -> list[TraceRequest]:
    """The same requests, every prompt cut to its first `longest` blocks."""
    return [
        replace(one, blocks=one.blocks[:longest], tokens=min(one.tokens, longest * BLOCK_TOKENS))
        for one in requests
    ]


def num_distinct(requests: Iterable[TraceRequest]) -> int:
    return len({block for request in requests for block in request.blocks})


def split(requests: Sequence[TraceRequest], parts: int) -> list[list[TraceRequest]]:
    """The requests in `parts` of about equal size; prompts with the same start stay together."""
    families: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        families[request.blocks[0]].append(request)
    sizes = [0] * parts
    shares: list[list[TraceRequest]] = [[] for _ in range(parts)]
    for family in sorted(families.values(), key=blocks_of, reverse=True):
        least = sizes.index(min(sizes))
        shares[least] += family
        sizes[least] += blocks_of(family)
    return [sorted(share, key=lambda one: one.at) for share in shares]


def blocks_of(requests: Iterable[TraceRequest]) -> int:
    return sum(len(request.blocks) for request in requests)


def multiplied(
    requests: Sequence[TraceRequest], per_s: float, seconds: float
) -> list[TraceRequest]:
    """`per_s` requests a second for `seconds`, from copies of a trace at its own pace.

    Copies share no blocks. Each starts at a random moment of the trace and wraps around.
    """
    begins = np.array([one.at for one in requests]) - requests[0].at
    span = float(begins[-1]) + 1.0
    copies = max(1, round(per_s * span / len(requests)))
    stride = 1 + max(block for request in requests for block in request.blocks)
    every: list[TraceRequest] = []
    for copy, moment in enumerate((np.random.default_rng(copies).random(copies) * span).tolist()):
        at = (begins - moment) % span
        for index in np.flatnonzero(at < seconds).tolist():
            one = requests[index]
            blocks = tuple(block + copy * stride for block in one.blocks)
            every.append(replace(one, at=float(at[index]), blocks=blocks))
    return sorted(every, key=lambda one: one.at)
