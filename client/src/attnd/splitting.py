"""Calls beyond the bounds of a request, split where nothing of them is all or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attnd.calls import control
from attnd.calls import prefix as calls
from attnd.calls.arguments import Int
from attnd.calls.call import Call
from attnd.calls.prefix import Prefix
from attnd.results import CommitResult
from attnd.retries import CallOrSteps, Steps
from attnd.wire.bounds import MAX_DELETED, MAX_NAMES


def delete_sequences(
    ids: Iterable[str] | None = None, *, prefix: str | None = None
) -> CallOrSteps[int]:
    """Delete the sequences `ids`, or all whose id begins with `prefix`; returns their number.

    Unknown ids are ignored. More than 1,024 ids are sent in several calls."""
    call = control.delete_sequences(ids, prefix=prefix)
    return call if len(call.fields.get("ids", ())) <= MAX_DELETED else deletions(call)


def deletions(call: Call[int]) -> Steps[int]:
    ids, deleted = call.fields["ids"], 0
    for first in range(0, len(ids), MAX_DELETED):
        deleted += yield replace(call, fields={"ids": ids[first : first + MAX_DELETED]})
    return deleted


def commit(
    sequence: str,
    prefix: Prefix,
    *,
    offset: Int = 0,
    priority: Int | None = None,
    duration_s: float | None = None,
) -> CallOrSteps[CommitResult]:
    """Name the sequence's full pages up to the end of `prefix`: they stay cached after its
    deletion.

    With `offset` the prefix begins after that many tokens, which are committed already: the
    `committed_len` of the previous commit. More than 131,072 token ids or keys are committed in
    several calls. Raises `UnknownSequence`, `InvalidRequest` beyond the sequence's length,
    `KeyMismatch`.
    """
    call = calls.commit(sequence, prefix, offset=offset, priority=priority, duration_s=duration_s)
    (names,) = call.arrays.values()
    return call if len(names) <= MAX_NAMES else commits(call)


def commits(call: Call[CommitResult]) -> Steps[CommitResult]:
    """Each begins where the committed pages of the one before end."""
    ((kind, names),) = call.arrays.items()
    before, at = call.fields.get("offset", 0), 0
    extra = call.fields.get("extra", ())
    while True:
        some = names[at : at + MAX_NAMES]
        fields: dict[str, Any] = call.fields | {"offset": before}
        within = [one for one in extra if at <= one["first_token"] < at + len(some)]
        fields["extra"] = [one | {"first_token": one["first_token"] - at} for one in within]
        if not within:
            del fields["extra"]
        done: CommitResult = yield replace(call, fields=fields, arrays={kind: some})
        if at + len(some) == len(names):
            return done
        at += len(some) if kind == "page_keys" else done.committed_len - before
        before = done.committed_len
