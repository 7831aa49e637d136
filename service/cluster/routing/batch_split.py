"""Splits a batch over several engines by its sequences, and joins the replies in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array
from numpy.typing import NDArray

from service.operations.schema.fields import Int32, check_mask_length

Arrays = dict[str, Array]
Int64 = NDArray[np.int64]
INDPTRS: Final = ("qo_indptr", "append_indptr", "keep_indptr", "names_indptr")
BY_ROW: Final = ("keep", "page_keys")
"""Lists with an entry for each row that an indptr counts."""
WHOLE: Final = ("sinks",)
"""Tensors that every piece gets."""
PACKED: Final = "packed_mask"
MASKS: Final = ("mask", PACKED)


@dataclass(frozen=True, slots=True)
class Piece:
    """One engine's part of a batch: the sequences at `positions`, with their `rows`."""

    positions: tuple[int, ...]
    rows: Int32
    fields: dict[str, Any]
    arrays: Arrays


def has_mask(arrays: Mapping[str, Array]) -> bool:
    """Whether splitting the batch needs the lengths of its sequences."""
    return any(name in arrays for name in MASKS)


def split_batch(
    given: dict[str, Any],
    arrays: Arrays,
    groups: Sequence[Sequence[int]],
    kv_lens: Int32 | None = None,
) -> list[Piece]:
    """The fields and tensors in pieces, one for each group of positions.

    `kv_lens` [batch]: the tokens of each sequence that a mask covers; needed where there is a mask.
    Raises InvalidRequest for a mask of another length.
    """
    sums = row_sums(given, len(given["sequences"]))
    masks = {name: arrays[name] for name in MASKS if name in arrays}
    others = {name: one for name, one in arrays.items() if name not in masks}
    pieces = [piece_of(given, others, group, sums) for group in groups]
    for name, mask in masks.items():
        if kv_lens is None:
            raise RuntimeError("a mask without the lengths of its sequences: this is a bug")
        is_packed = name == PACKED
        check_mask_length(mask.size, is_packed, np.diff(sums), kv_lens)
        ends = segment_ends(np.diff(sums), kv_lens, is_packed=is_packed)
        segments = np.split(mask.reshape(-1), ends[:-1])
        for piece, group in zip(pieces, groups, strict=True):
            piece.arrays[name] = np.concatenate([segments[at] for at in group])
    return pieces


def segment_ends(qo_lens: Int32, kv_lens: Int32, *, is_packed: bool) -> Int64:
    """The end of each sequence's segment of a mask, in elements or bytes, [batch]."""
    sizes = np.multiply(qo_lens, kv_lens, dtype=np.int64)
    return np.cumsum(-(-sizes // 8) if is_packed else sizes)


def row_sums(given: dict[str, Any], batch: int) -> Int32:
    """The prefix sums of the batch's rows, int32 [batch + 1]."""
    for name in INDPTRS:
        if given.get(name) is not None:
            return np.array(given[name], np.int32)
    return np.arange(batch + 1, dtype=np.int32)


def piece_of(given: dict[str, Any], arrays: Arrays, group: Sequence[int], sums: Int32) -> Piece:
    fields = dict(given)
    for name in ("sequences", "offsets", "lengths", "extra"):
        if given.get(name) is not None:
            fields[name] = [given[name][at] for at in group]
    indptrs = [name for name in INDPTRS if given.get(name) is not None]
    if indptrs:
        counts = np.diff(sums)[list(group)]
        fields[indptrs[0]] = [0, *np.cumsum(counts).tolist()]
        rows = np.concatenate([np.arange(sums[at], sums[at + 1], dtype=np.int32) for at in group])
    else:
        rows = np.array(group, np.int32)
    for name in BY_ROW:
        if given.get(name) is not None:
            fields[name] = [given[name][at] for at in rows]
    arrays = dict(arrays)
    own = given.get("ids_indptr")
    ids_sums = sums if own is None else np.array(own, np.int32)
    ids = np.concatenate([np.arange(*ids_sums[at : at + 2], dtype=np.int32) for at in group])
    if own is not None:
        fields["ids_indptr"] = [0, *np.cumsum(np.diff(ids_sums)[list(group)]).tolist()]
    if given.get("token_ids") is not None:
        fields["token_ids"] = [given["token_ids"][at] for at in ids]
    named = {"token_ids": arrays.pop("token_ids")[ids]} if "token_ids" in arrays else {}
    # with `layers` the rows are the second axis
    every = (slice(None), rows) if given.get("layers") is not None else rows
    parts = {name: one if name in WHOLE else one[every] for name, one in arrays.items()}
    return Piece(tuple(group), rows, fields, parts | named)


def join(
    pieces: Sequence[Piece], replies: Sequence[tuple[dict[str, Any], Arrays]]
) -> tuple[dict[str, Any], Arrays]:
    """The replies to the pieces as one, in the order of the request."""
    first = replies[0][0]
    if "kv_indptr" in first:
        return join_gathered(pieces, replies)
    names = dict.fromkeys(name for one, _ in replies for name in one)
    fields = {name: JOINED[name](pieces, [one.get(name) for one, _ in replies]) for name in names}
    num_rows = sum(piece.rows.size for piece in pieces)
    arrays: Arrays = {}
    for name, like in replies[0][1].items():
        arrays[name] = whole = np.empty((num_rows, *like.shape[1:]), like.dtype)
        for piece, (_, parts) in zip(pieces, replies, strict=True):
            whole[piece.rows] = parts[name]
    return fields, arrays


def join_gathered(
    pieces: Sequence[Piece], replies: Sequence[tuple[dict[str, Any], Arrays]]
) -> tuple[dict[str, Any], Arrays]:
    """The joined reply to a gather: `kv_indptr` of each reply says how many rows a sequence has."""
    batch = sum(len(piece.positions) for piece in pieces)
    parts: list[tuple[Arrays, int, int]] = [({}, 0, 0)] * batch
    for piece, (fields, arrays) in zip(pieces, replies, strict=True):
        sums = fields["kv_indptr"]
        for index, at in enumerate(piece.positions):
            parts[at] = arrays, sums[index], sums[index + 1]
    sums = np.cumsum([0, *(end - begin for _, begin, end in parts)]).tolist()
    joined = {
        name: np.concatenate([arrays[name][begin:end] for arrays, begin, end in parts])
        for name in replies[0][1]
    }
    return {"kv_indptr": sums}, joined


def in_order(pieces: Sequence[Piece], values: Sequence[list[Any]]) -> list[Any]:
    found: list[Any] = [None] * sum(len(piece.positions) for piece in pieces)
    for piece, some in zip(pieces, values, strict=True):
        for at, value in zip(piece.positions, some, strict=True):
            found[at] = value
    return found


JOINED: Final[dict[str, Callable[[Sequence[Piece], Sequence[Any]], Any]]] = {
    "lengths": in_order,
    "sequences": in_order,
    "known_len": in_order,
    "committed_len": in_order,
    "committed_lens": in_order,
    "num_pages": in_order,
    "last_keys": in_order,
    "durable": lambda _, values: all(values),
    "lse_base": lambda _, values: values[0],
    "levels": lambda _, values: max(values),
    "cascade": lambda _, values: any(values),
}
"""How each field of a reply is joined from the pieces' fields."""
