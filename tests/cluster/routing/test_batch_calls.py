"""Batches whose sequences move meanwhile: pieces split again, errors list finished changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest

from service.cluster.membership.engine import EngineSession
from service.cluster.routing.sequence_calls import joint_error
from service.doors.kit.problems import ProblemText, document_of
from service.errors import DeadlineExceeded, LengthMismatch, LostSequence, NotReady
from service.image.json_text import dump_json
from service.tenants import OPEN
from tests.cluster.checked_calls import SCALE, Book
from tests.cluster.harness import ATOL, HEADS, PAGE, Cluster, rows


def problem(error: Exception, done: Sequence[str] = ()) -> ProblemText:
    return ProblemText(dump_json(document_of(error, b"") | ({"done": list(done)} if done else {})))


@pytest.mark.parametrize(
    ("errors", "done", "code", "every", "lost"),
    [
        ([problem(LengthMismatch({"b": 1}), ["a"])], ["c"], "length_mismatch", ["c", "a"], None),
        (
            [problem(NotReady("x"), ["a"]), problem(NotReady("y"), ["b", "a"])],
            [],
            "not_ready",
            ["a", "b"],
            None,
        ),
        (
            [NotReady("x"), problem(LostSequence(["b"]), ["a"]), LostSequence(["d"])],
            ["c"],
            "lost_sequence",
            ["c", "a"],
            ["b", "d"],
        ),
        ([NotReady("x"), LostSequence(["d"])], [], "lost_sequence", None, ["d"]),
        ([RuntimeError("a bug")], ["c"], "internal", ["c"], None),
        ([NotReady("x"), DeadlineExceeded("y")], [], "deadline_exceeded", None, None),
        (
            [LostSequence(["d"]), problem(DeadlineExceeded("y"), ["b"])],
            ["c"],
            "deadline_exceeded",
            ["c", "b"],
            None,
        ),
    ],
)
def test_a_joint_error_lists_what_all_pieces_have_done(
    errors: list[BaseException], done: list[str], code: str, every: Any, lost: Any
) -> None:
    reply = document_of(joint_error(errors, done), b"")
    assert (reply["code"], reply.get("done")) == (code, every)
    assert lost is None or reply["sequences"] == lost


async def apart(cluster: Cluster, book: Book) -> tuple[EngineSession, EngineSession]:
    """`a` on one engine, `b` and `c` on another."""
    first, second, *_ = cluster.router.members.engines
    for name, at in (("a", first), ("b", second), ("c", second)):
        for engine in cluster.router.members.engines:
            engine.is_leaving = engine is not at
        await book.create(name)
        await book.append(name, PAGE + 1)
    for engine in cluster.router.members.engines:
        engine.is_leaving = False
    return first, second


async def test_an_error_lists_the_changes_of_a_piece_that_was_split_again(cluster: Cluster) -> None:
    book = Book(cluster)
    first, _ = await apart(cluster, book)
    cluster.router.ids.learn(OPEN, ["b"], first.tag)  # a session made it there
    new = rows(np.random.default_rng(0), 3)
    fields = {"layer": 0, "sequences": ["a", "b", "c"], "offsets": [PAGE + 1, 0, PAGE + 1]}
    reply = await cluster.call("append", fields | {"append_indptr": [0, 1, 2, 3]}, k=new, v=new)
    assert (reply.status, reply.fields["code"]) == (409, "length_mismatch"), reply
    assert sorted(reply.fields["done"]) == ["a", "c"]
    lengths = [PAGE + 2, PAGE + 1, PAGE + 2]
    for name, length in zip("abc", lengths, strict=True):
        view = await cluster.ok("get_sequence", {"id": name})
        assert view.fields["lengths"][0] == length


@pytest.mark.parametrize("names", [["b"], ["a", "b"], ["b", "c"]])
async def test_sequences_that_the_map_has_wrong_again_and_again_are_found(
    cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book, entries, looks = Book(cluster), cluster.router.ids, 0
    first, _ = await apart(cluster, book)
    find = entries.find

    async def mislead(ids: Sequence[str], tenant: Any) -> None:
        nonlocal looks
        looks += 1
        await find(ids, tenant)
        if looks < 5:
            for name in ids:
                entries.learn(OPEN, [name], first.tag)

    entries.learn(OPEN, ["b"], first.tag)
    monkeypatch.setattr(entries, "find", mislead)
    await book.attend(names, [1] * len(names), 0, appends=True)
    assert looks == 5
    await book.attend(names, [1] * len(names), 0, appends=False)


@pytest.mark.parametrize("name", ["mask", "packed_mask"])
@pytest.mark.parametrize("appends", [False, True])
async def test_a_mask_over_several_engines_gives_the_numbers_of_one_engine(
    cluster: Cluster, name: str, appends: bool
) -> None:
    book, names, counts = Book(cluster), ["b", "a", "c"], [2, 3, 2]
    await apart(cluster, book)
    await book.append("c", 2)
    new = book.grow(names, counts, 1) if appends else {}
    lengths = [len(book.held[one][1][0]) for one in names]
    masks = [
        book.rng.integers(0, 2, (count, length)).astype(bool)
        for count, length in zip(counts, lengths, strict=True)
    ]
    flat = [mask.ravel() for mask in masks]
    if name == "packed_mask":
        flat = [np.packbits(bits, bitorder="little") for bits in flat]
    q = rows(book.rng, sum(counts), 2 * HEADS)
    fields = {"layer": 1, "sequences": names, "qo_indptr": [0, *np.cumsum(counts).tolist()]}
    mask = {name: np.concatenate(flat)}
    for wrong in (mask[name][1:], np.append(mask[name], mask[name][:1])):
        refused = await cluster.call("prefill", fields, q=q, **new, **{name: wrong})
        assert (refused.status, refused.fields["field"]) == (422, name), refused
        assert "done" not in refused.fields
    reply = await cluster.ok("prefill", fields, q=q, **new, **mask)
    begin = 0
    for one, count, seen in zip(names, counts, masks, strict=True):
        mine = slice(begin, begin + count)
        o, lse = oracle.attend(q[mine], *book.held[one][1], seen, sm_scale=SCALE)
        np.testing.assert_allclose(reply.arrays["o"][mine], o, atol=ATOL, err_msg=one)
        np.testing.assert_allclose(reply.arrays["lse"][mine], lse, atol=ATOL, err_msg=one)
        begin += count
    for one in names:
        await book.check(one)
