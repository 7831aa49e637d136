"""Checks on a list of sequences to make: ids, parents, and what each one starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from service.core.errors import InvalidRequest, SequenceExists, SequenceTaken, UnknownSequence
from service.core.sequences.books import SequenceBooks, refuse_twice
from service.core.shards.layout import WHOLE, Shard
from service.core.values import NewSpec


class Start(NamedTuple):
    """How many tokens a sequence has here as it is made, which of its pages come here, and how many
    tokens a shard's whole sequence has, in which epoch."""

    length: int
    shard: Shard
    whole_length: int = 0
    epoch: int = 0


def first_lengths(books: SequenceBooks, new: Sequence[NewSpec], page_size: int) -> list[Start]:
    """What each of `new` starts with; a parent may come earlier in `new`.

    Raises `InvalidRequest`, `SequenceExists` (every such id), `UnknownSequence` (every parent).
    """
    refuse_twice([spec.id for spec in new])
    if existing := [spec.id for spec in new if spec.id in books]:
        raise SequenceExists(existing)
    made: dict[str, Start] = {}
    begun: set[str] = set()
    unknown: list[str] = []
    for spec in new:
        made[spec.id] = Start(0, spec.shard or WHOLE, 0, spec.epoch)
        if spec.prefix is not None and (spec.parent is not None or spec.length is not None):
            raise InvalidRequest("prefix", "given", "a sequence has a parent or a prefix, not both")
        if spec.prefix is not None:
            begun.add(spec.id)
        elif spec.parent in begun:
            rule = "its length is known when it is made: fork it by a later call"
            raise InvalidRequest("parent", spec.parent, rule)
        elif spec.parent is None:
            if spec.length:
                raise InvalidRequest("length", spec.length, "0, or a parent to take tokens from")
        elif spec.parent in books or (spec.parent in made and spec.parent != spec.id):
            made[spec.id] = _fork(books, made, spec, page_size)
        else:
            unknown.append(spec.parent)
    if unknown:
        raise UnknownSequence(unknown)
    return list(made.values())


def _fork(books: SequenceBooks, made: dict[str, Start], spec: NewSpec, page_size: int) -> Start:
    parent = spec.parent or ""
    if parent in made:
        longest, shard, whole_length, epoch = made[parent]
    else:
        leaf = books.leaf(parent)
        longest, shard, whole_length, epoch = books.length(leaf), leaf.shard, 0, 0
        if leaf.whole is not None:
            whole_length, epoch = int(leaf.whole.lengths.min()), leaf.whole.epoch
    if spec.epoch != epoch:
        raise SequenceTaken({parent: epoch})
    if spec.shard is not None:
        raise InvalidRequest("shard", spec.id, "a fork has the shard of its parent: leave it out")
    length = longest if spec.length is None else spec.length
    if not shard.is_whole and spec.length is not None:
        if not 0 <= spec.length <= whole_length:
            rule = f"0 to {whole_length}, the length of the parent's whole sequence"
            raise InvalidRequest("length", spec.length, rule)
        length, whole_length = shard.held(spec.length, page_size), spec.length
    if not 0 <= length <= longest:
        raise InvalidRequest("length", spec.length, f"0 to {longest}, the parent's length")
    return Start(length, shard, whole_length, epoch)
