"""Common beginnings of the prompts of a batch: computed once, forked for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from attnd.transformers.batch import Batch
from attnd.transformers.columns import Bools, Columns
from attnd.transformers.releases import CACHE

Tokens = list[int]


class Trunk(Protocol):
    """A cache that can be forked: an `AttndCache`."""

    batch: Batch

    @property
    def rope_tokens(self) -> int | None: ...
    def get_seq_length(self) -> int: ...
    def fork(self, rows: Sequence[int] | None = None) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A batch whose rows hold their common tokens: `saved` tokens are not computed again."""

    sequences: list[str]
    columns: Columns | None
    saved: int


@dataclass(frozen=True, slots=True)
class Node:
    """Prompts that begin with the same `length` tokens: `rows`, and more in `children`."""

    length: int
    rows: tuple[int, ...]
    children: tuple[Node, ...]


def share(
    cache: Trunk,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    least: int,
) -> Shared:
    """Prefill beginnings of `least` tokens or more that at least two prompts share."""
    ids = input_ids.cpu().numpy()
    mask = np.ones(ids.shape, np.bool_)
    if attention_mask is not None:
        mask = attention_mask.cpu().numpy().astype(np.bool_)
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"input_ids is {list(ids.shape)} and attention_mask {list(mask.shape)}: "
            "both are [rows, columns]"
        )
    prompts = [row[seen].tolist() for row, seen in zip(ids, mask, strict=True)]
    limit = cache.rope_tokens
    root = tree_of(prompts, range(len(prompts)), 0, least)
    is_common = root.length or root.children
    if not is_common or (limit is not None and max(map(len, prompts)) > limit):
        return Shared([], None, 0)
    names = [""] * len(prompts)
    lengths = [0] * len(prompts)
    with ExitStack() as stack, torch.no_grad():
        computed = 0
        for node, branch, count in grown(stack, cache, model, prompts, root):
            computed += count
            for row, name in zip(node.rows, branch.batch.disown(), strict=True):
                names[row], lengths[row] = name, node.length
    return Shared(names, stored_columns(mask, lengths), sum(lengths) - computed)


def tree_of(prompts: list[Tokens], rows: Sequence[int], begin: int, least: int) -> Node:
    """The tree of common beginnings of these rows, which share `begin` tokens.

    The last token of a prompt is never shared: its logits are what generation begins with.
    """
    common = common_length([prompts[row] for row in rows])
    length = common if common - begin >= least else begin
    groups: dict[int, list[int]] = {}
    for row in rows:
        if len(prompts[row]) > common + 1:
            groups.setdefault(prompts[row][common], []).append(row)
    trees = [tree_of(prompts, group, length, least) for group in groups.values() if len(group) > 1]
    children = tuple(
        node for tree in trees for node in ([tree] if tree.length > length else tree.children)
    )
    elsewhere = {row for child in children for row in rows_under(child)}
    return Node(length, tuple(row for row in rows if row not in elsewhere), children)


def common_length(prompts: list[Tokens]) -> int:
    """Tokens that all begin with, but for the last token of the shortest."""
    least, most = min(prompts), max(prompts)  # tokens common to these two are common to all
    limit = max(min(map(len, prompts)) - 1, 0)
    pairs = zip(least[:limit], most[:limit], strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), limit)


def rows_under(node: Node) -> list[int]:
    return [*node.rows, *(row for child in node.children for row in rows_under(child))]


def grown(
    stack: ExitStack, parent: Trunk, model: Any, prompts: list[Tokens], node: Node
) -> list[tuple[Node, Trunk, int]]:
    """Compute a node's tokens behind its parent's, then its children.

    Answers each node with a cache of a row for each of its rows, and how many tokens it computed.
    """
    trunk = stack.enter_context(parent.fork())
    begin = trunk.get_seq_length()
    if node.length > begin:
        some = rows_under(node)[0]
        tokens = torch.tensor([prompts[some][begin : node.length]], device=model.device)
        model.base_model(input_ids=tokens, **{CACHE: trunk}, use_cache=True)
    branch = stack.enter_context(trunk.fork([0] * len(node.rows) if node.length else None))
    if not node.length:
        branch.batch.start(len(node.rows))
    below = [grown(stack, trunk, model, prompts, child) for child in node.children]
    return [(node, branch, node.length - begin), *(one for each in below for one in each)]


def stored_columns(mask: Bools, lengths: Sequence[int]) -> Columns:
    """The first visible columns of each row, `lengths` of them."""
    stored = mask & (np.cumsum(mask, axis=1) <= np.asarray(lengths)[:, None])
    covered = (mask & ~stored).argmax(axis=1).min()
    return Columns(stored, int(covered))
