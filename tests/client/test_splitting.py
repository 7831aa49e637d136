"""Deletions and commits beyond the bounds of a call: in several calls, each within them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attnd import Prefix
from attnd.calls.call import Call
from attnd.results import CommitResult
from attnd.retries import driven
from attnd.splitting import commit, delete_sequences
from attnd.wire.bounds import MAX_DELETED, MAX_NAMES

PAGE = 48  # MAX_NAMES is no multiple of it


def test_many_ids_are_deleted_in_several_calls_and_counted_together() -> None:
    ids = [f"s{number}" for number in range(2 * MAX_DELETED + 3)]
    sent: list[str] = []

    def send(call: Call[int]) -> int:
        assert 0 < len(call.fields["ids"]) <= MAX_DELETED
        sent.extend(call.fields["ids"])
        return len(call.fields["ids"]) - 1  # one of each is unknown

    assert driven(delete_sequences(ids), send) == len(ids) - 3  # type: ignore[arg-type]
    assert sent == ids
    assert isinstance(delete_sequences(ids[:MAX_DELETED]), Call)
    assert isinstance(delete_sequences(prefix="s"), Call)


class Pages:
    """The service's side of commits: names of pages, in order, without gaps."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.extra: list[int] = []

    def commit(self, call: Call[CommitResult]) -> CommitResult:
        ((kind, names),) = call.arrays.items()
        assert len(names) <= MAX_NAMES
        offset, width = call.fields.get("offset", 0), PAGE if kind == "token_ids" else 1
        assert offset == len(self.names) * PAGE
        self.extra += [offset + one["first_token"] for one in call.fields.get("extra", ())]
        pages = len(names) // width
        self.names += np.array_split(names[: pages * width], pages) if pages else []
        return CommitResult(len(self.names) * PAGE, len(self.names), None)


@pytest.mark.parametrize("extra", [(), ((5, b"a"), (MAX_NAMES - 1, b"b"), (2 * MAX_NAMES, b"c"))])
def test_a_long_prompt_is_committed_part_after_part(extra: Any) -> None:
    ids = np.arange(2 * MAX_NAMES + 5 * PAGE + 1, dtype=np.uint32)
    pages = Pages()
    result = driven(commit("a", Prefix(token_ids=ids, extra=extra)), pages.commit)  # type: ignore[arg-type]
    whole = len(ids) // PAGE * PAGE
    assert result.committed_len == whole
    assert np.array_equal(np.concatenate(pages.names), ids[:whole])
    assert sorted(set(pages.extra)) == [first for first, _ in extra]  # one twice, in a page cut off


def test_many_page_keys_are_committed_part_after_part() -> None:
    keys = np.arange(16 * (MAX_NAMES + 7), dtype=np.uint32).astype(np.uint8).reshape(-1, 16)
    pages = Pages()
    result = driven(commit("a", Prefix(page_keys=keys)), pages.commit)  # type: ignore[arg-type]
    assert result.num_pages == len(keys) and len(pages.names) == len(keys)
    assert isinstance(commit("a", Prefix(page_keys=keys[:MAX_NAMES])), Call)
