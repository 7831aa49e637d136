"""Token ids that calls bring: learned with their rows, and reported in their replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from service.core.nodes import Leaf
from service.core.values import Extension, Int32
from service.engine.store.store import Store
from service.engine.work.request import Request

KNOWN_BYTES: Final = 24
"""Room for the two numbers of one sequence in an answer, which are as long for any value."""
NAMES_BYTES: Final = 40


def has_ids(request: Request) -> bool:
    return "token_ids" in request.tensors or request.fields.token_ids is not None


def room(request: Request) -> int:
    """Room for what a call with token ids adds to its answer."""
    return NAMES_BYTES + KNOWN_BYTES * len(request.fields.ids) if has_ids(request) else 0


def learn(store: Store, request: Request, extension: Extension, rows: Int32) -> None:
    """The ids that a call brings: those of its `rows` [B+1], or as many of each sequence as it
    says. They are forgotten where the extension is undone; it is undone here where they are
    refused."""
    given = request.tensors.get("token_ids", request.fields.ids_array)
    sums, before = request.fields.ids_indptr_array, extension.before
    ids = np.array(given, np.uint32)  # copied: the caller may write to them
    is_exact = sums is None and ids.size == rows[-1]
    if is_exact:
        sums, before = rows, np.maximum(extension.lengths - np.diff(rows), 0)
    elif sums is None:  # of one sequence
        sums = np.array([0, ids.size], np.int32)
    try:
        extension.known = store.tree.naming.learn(
            extension.leaves, before, extension.lengths, ids, sums, is_exact=is_exact
        )
    except BaseException:
        store.undo(extension)
        raise


def lens_of(store: Store, leaves: Sequence[Leaf]) -> dict[str, list[int]]:
    """`known_len` and `committed_len` of sequences."""
    naming, size = store.tree.naming, store.geometry.page_size
    return {
        "known_len": [naming.known(leaf) for leaf in leaves],
        "committed_len": [naming.num_named(leaf) * size for leaf in leaves],
    }


def lens_text(store: Store, leaves: Sequence[Leaf]) -> str:
    """The same as members of a JSON object that has others, as long for any values."""
    lens = lens_of(store, leaves)
    return "".join(
        f',"{name}":[{",".join(f"{number:>10}" for number in values)}]'
        for name, values in lens.items()
    )
