"""One reply for a sharded sequence, made of its engines' replies.

Page i of a sequence is at rank i mod `ranks`: see `service.core.shards.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from kernels.states import add_sinks, merge_states
from service.core.shards.layout import held

Fields = dict[str, Any]
LN2: Final = np.float32(math.log(2))


def whole_view(parts: Sequence[Mapping[str, Any]]) -> Fields:
    """The description of a sequence, from the descriptions of its shards by rank."""
    known = (part["shard"]["lengths"] for part in parts)
    lengths = [min(column) for column in zip(*known, strict=True)]
    pages = sum(part["pages"] for part in parts)
    last = parts[max(pages - 1, 0) % len(parts)]
    whole = {name: value for name, value in parts[0].items() if name != "shard"}
    return whole | {
        "length": min(lengths),
        "lengths": lengths,
        "pages": pages,
        "last_page_len": last["last_page_len"],
    }


def one_state(
    replies: Sequence[Mapping[str, Array]], base: str, sinks: Array | None
) -> dict[str, Array]:
    """The ranks' states of the same rows as one, and `sinks`; log-sum-exps are in `base`."""
    o = np.stack([one["o"] for one in replies], axis=1)
    lse = np.stack([one["lse"] for one in replies], axis=1)
    unit = LN2 if base == "2" else np.float32(1)
    merged = merge_states(o, lse * unit)
    if sinks is not None:
        merged = add_sinks(merged, sinks)
    return {"o": np.asarray(merged.o), "lse": np.asarray(merged.lse) / unit}


def has_all(
    replies: Sequence[tuple[Fields, Mapping[str, Array]]],
    lengths: Sequence[int],
    span: tuple[int, int | None],
    page_size: int,
) -> bool:
    """Whether every rank has sent as many rows as it holds in sequences of these lengths."""
    stop = np.array(lengths) if span[1] is None else np.minimum(lengths, span[1])
    start = np.minimum(stop, span[0])
    for rank, (fields, _) in enumerate(replies):
        before, after = (held(at, rank, len(replies), page_size) for at in (start, stop))
        if not np.array_equal(np.diff(fields["kv_indptr"]), after - before):
            return False
    return True


def gathered(
    replies: Sequence[tuple[Fields, Mapping[str, Array]]],
    lengths: Sequence[int],
    span: tuple[int, int | None],
    page_size: int,
) -> tuple[Fields, dict[str, Array]]:
    """K and V of tokens `span` of each sequence, in order, from the rows that every rank has."""
    ranks, sums, places = len(replies), [0], []
    for length in lengths:
        stop = length if span[1] is None else min(span[1], length)
        token = np.arange(min(span[0], length), stop)
        places.append(token // page_size % ranks)
        sums.append(sums[-1] + token.size)
    whole: dict[str, Array] = {}
    for name, like in replies[0][1].items():
        whole[name] = np.empty((sums[-1], *like.shape[1:]), like.dtype)
        for rank, (fields, arrays) in enumerate(replies):
            own = fields["kv_indptr"]
            for index, place in enumerate(places):
                into = whole[name][sums[index] : sums[index + 1]]
                into[place == rank] = arrays[name][own[index] : own[index + 1]]
    return {"kv_indptr": sums}, whole
