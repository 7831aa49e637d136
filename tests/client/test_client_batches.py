"""Calls as large as a scheduler's step, by every client against a running service."""

from __future__ import annotations

from typing import Any

import attnd
import numpy as np
import pytest
from attnd import Prefix

from tests.client.running_service import POOL

LAYERS, HEADS, DIM = (int(POOL[name]) for name in ("num-layers", "num-kv-heads", "head-dim"))
PAGE = int(POOL["page-size"])


def rows(count: int) -> Any:
    return np.random.default_rng(count).normal(size=(LAYERS, count, HEADS, DIM)).astype(np.float32)


def test_a_step_of_many_sequences_is_three_calls(caller: Any) -> None:
    ids = [caller.create_sequence(name).id for name in ("a", "b")]
    k, v = rows(60), rows(61)[:, :60]
    reply = caller.append(range(LAYERS), ids, k, v, append_indptr=[0, 40, 60], offsets=[0, 0])
    assert reply.lengths == (40, 20)
    names = [np.arange(40), np.arange(100, 120)]
    first = caller.commit_sequences(ids, [Prefix(names[0][:PAGE]), Prefix(names[1])])
    assert [one.committed_len for one in first] == [PAGE, PAGE]
    offsets = [one.committed_len for one in first]
    rest = [Prefix(ids[at:]) for ids, at in zip(names, offsets, strict=True)]
    second = caller.commit_sequences(ids, rest, offsets=offsets, priority=50)
    assert [one.committed_len for one in second] == [2 * PAGE, PAGE]
    views = caller.truncate_sequences(ids, [33, 17], keep=[[35, 38], [19]])
    assert [(view.id, view.length) for view in views] == [("a", 35), ("b", 18)]
    view = caller.truncate("a", 33, keep=[34])
    assert view.lengths == (34,) * LAYERS
    chosen = [*range(33), 38, *range(40, 57), 59]
    for layer in range(LAYERS):
        gathered = caller.gather(layer, ids)
        np.testing.assert_array_equal(gathered.k, k[layer][chosen])
        np.testing.assert_array_equal(gathered.v, v[layer][chosen])
    assert caller.match_prefix(Prefix(names[0]), lease_s=0).matched_len == 2 * PAGE
    assert caller.commit("a", Prefix(names[0][PAGE : 2 * PAGE]), offset=PAGE).num_pages == 2


def test_a_step_that_is_refused_changes_no_sequence(caller: Any) -> None:
    caller.create_sequences([attnd.NewSequence("a"), attnd.NewSequence("b")])
    k = rows(4)
    with pytest.raises(attnd.LengthMismatch):
        caller.append([0, 1], ["a", "b"], k, k + 1, append_indptr=[0, 2, 4], offsets=[0, 1])
    caller.append([0, 1], ["a", "b"], k, k + 1, append_indptr=[0, 2, 4])
    with pytest.raises(attnd.InvalidRequest) as refused:
        caller.truncate_sequences(["a", "b"], [1, 3])
    assert (refused.value.field, refused.value.value) == ("lengths", "['b', 3]")
    with pytest.raises(attnd.UnknownSequence):
        caller.commit_sequences(["a", "missing"], [Prefix([1, 2]), Prefix([1])])
    assert [caller.get_sequence(name).length for name in ("a", "b")] == [2, 2]
