"""Checks sequences to create, and derives the state that each starts with."""

from __future__ import annotations

from collections.abc import Sequence

from service.core.errors import InvalidRequest, SequenceExists, UnknownSequence
from service.core.sequences.books import SequenceBooks, check_distinct
from service.core.values import NewSpec


def first_lengths(books: SequenceBooks, new: Sequence[NewSpec]) -> list[int]:
    """The first length of each of `new`; a parent can be an earlier one of `new`.

    Raises `InvalidRequest`, `SequenceExists` (all such ids), `UnknownSequence` (all such parents).
    """
    check_distinct([spec.id for spec in new])
    if existing := [spec.id for spec in new if spec.id in books]:
        raise SequenceExists(existing)
    made: dict[str, int] = {}
    from_prefix: set[str] = set()
    unknown: list[str] = []
    for spec in new:
        made[spec.id] = 0
        if spec.prefix is not None and (spec.parent is not None or spec.length is not None):
            raise InvalidRequest("prefix", "given", "cannot be combined with parent or length")
        if spec.prefix is not None:
            from_prefix.add(spec.id)
        elif spec.parent in from_prefix:
            rule = "its length is not known before it is created: fork it in a later call"
            raise InvalidRequest("parent", spec.parent, rule)
        elif spec.parent is None:
            if spec.length:
                raise InvalidRequest("length", spec.length, "must be 0 without a parent")
        elif spec.parent in books or (spec.parent in made and spec.parent != spec.id):
            known = made.get(spec.parent)
            longest = books.length(books.leaf(spec.parent)) if known is None else known
            made[spec.id] = longest if spec.length is None else spec.length
            if not 0 <= made[spec.id] <= longest:
                raise InvalidRequest("length", spec.length, f"0 to {longest}, the parent's length")
        else:
            unknown.append(spec.parent)
    if unknown:
        raise UnknownSequence(unknown)
    return list(made.values())
