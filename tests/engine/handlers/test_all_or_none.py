"""Operations on many sequences are done for all or for none, whichever member is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from tests.engine.fake_backend import GEOMETRY
from tests.engine.harness import Caller, NewCall, creation, decode, fake_engine, gather, rows

PAGE: Final = GEOMETRY.page_size
LAYERS: Final = range(GEOMETRY.num_layers)
MEMBERS: Final = [(n, at) for n in (1, 2, 3, 9) for at in sorted({0, n // 2, n - 1})]
"""How many members, and which of them is refused."""
Wrong = Callable[[list[str], int], tuple[NewCall, NewCall]]
"""A call on some sequences that is refused because of one of them, and one that is not."""


def prompt(at: int) -> list[int]:
    return list(range(100 * at, 100 * at + PAGE))


def instead(items: list[Any], at: int, item: Any) -> list[Any]:
    return [*items[:at], item, *items[at + 1 :]]


def append(names: list[str], layer: int = 0) -> NewCall:
    k = rows(7, len(names))
    return NewCall("append", {"layer": layer, "sequences": names}, {"k": k, "v": k})


def append_both(names: list[str]) -> NewCall:
    k = np.stack([rows(7, len(names))] * GEOMETRY.num_layers)
    return NewCall("append", {"layers": [*LAYERS], "sequences": names}, {"k": k, "v": k})


def commit(names: list[str], ids: list[list[int]]) -> NewCall:
    ends = np.cumsum([0, *map(len, ids)]).tolist()
    tokens = [token for one in ids for token in one]
    return NewCall(
        "commit_sequences", {"sequences": names, "token_ids": tokens, "names_indptr": ends}
    )


def cut(names: list[str], lengths: list[int]) -> NewCall:
    return NewCall("truncate_sequences", {"sequences": names, "lengths": lengths})


def prefill(names: list[str]) -> NewCall:
    ends = list(range(len(names) + 1))
    return decode(*names, new=True).but(name="prefill", qo_indptr=ends, causal=True)


def forks(names: list[str], **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"of-{name}", "parent": name} | fields for name in names]


def unknown(make: Callable[[list[str]], NewCall]) -> Wrong:
    return lambda names, at: (make(instead(names, at, "missing")), make(names))


def ahead(make: Callable[[list[str]], NewCall]) -> Wrong:
    """One has another length than its caller believes."""

    def both(names: list[str], at: int) -> tuple[NewCall, NewCall]:
        offsets = [PAGE] * len(names)
        wrong = make(names).but(offsets=instead(offsets, at, PAGE + 1))
        return wrong, make(names).but(offsets=offsets)

    return both


def created(wrong: Callable[[list[str], int], dict[str, Any]]) -> Wrong:
    return lambda names, at: (
        creation(*instead(forks(names), at, wrong(names, at))),
        creation(*forks(names)),
    )


def commits(wrong: list[int]) -> Wrong:
    def both(names: list[str], at: int) -> tuple[NewCall, NewCall]:
        ids = [prompt(number) for number in range(len(names))]
        return commit(names, instead(ids, at, wrong)), commit(names, ids)

    return both


def cuts(wrong: int) -> Wrong:
    return lambda names, at: (
        cut(names, instead([1] * len(names), at, wrong)),
        cut(names, [1] * len(names)),
    )


CASES: Final[dict[str, tuple[str, Wrong]]] = {
    "append, unknown": ("unknown_sequence", unknown(append)),
    "append, another length": ("length_mismatch", ahead(append)),
    "append at two layers, unknown": ("unknown_sequence", unknown(append_both)),
    "append at two layers, another length": ("length_mismatch", ahead(append_both)),
    "decode, unknown": ("unknown_sequence", unknown(lambda names: decode(*names, new=True))),
    "decode, another length": ("length_mismatch", ahead(lambda names: decode(*names, new=True))),
    "prefill, unknown": ("unknown_sequence", unknown(prefill)),
    "prefill, another length": ("length_mismatch", ahead(prefill)),
    "truncate, unknown": ("unknown_sequence", unknown(lambda names: cut(names, [1] * len(names)))),
    "truncate, beyond the end": ("invalid_request", cuts(PAGE + 1)),
    "commit, unknown": (
        "unknown_sequence",
        unknown(lambda names: commit(names, [prompt(0)] * len(names))),
    ),
    "commit, more ids than tokens": ("invalid_request", commits(list(range(PAGE + 1)))),
    "create, the id exists": ("sequence_exists", created(lambda names, at: {"id": names[at]})),
    "create, unknown parent": (
        "unknown_sequence",
        created(lambda names, at: {"id": "new", "parent": "missing"}),
    ),
    "create, beyond the parent's end": (
        "invalid_request",
        created(lambda names, at: {"id": "new", "parent": names[at], "length": PAGE + 1}),
    ),
}


async def begin(caller: Caller, count: int) -> list[str]:
    """`count` sequences of a page at every layer, and no others."""
    await caller.call("delete_sequences", {"prefix": ""})
    await caller.call("clear")
    names = [f"s{number}" for number in range(count)]
    await caller.create(*names)
    for layer in LAYERS:
        for _ in range(PAGE):
            await caller.submit(append(names, layer))
    return names


async def state(caller: Caller, names: list[str]) -> Any:
    """All that a caller can see of sequences, rows, pages and names."""
    every = (await caller.call("list_sequences")).fields["sequences"]
    gathered = [(await caller.submit(gather(*names, layer=layer))).tensors for layer in LAYERS]
    found = []
    for number in range(len(names)):
        fields = {"token_ids": prompt(number), "lease_s": 0.0}
        found.append((await caller.call("match_prefix", fields)).fields["matched_len"])
    content = [{name: one.tobytes() for name, one in tensors.items()} for tensors in gathered]
    events = (await caller.call("events", {"after": 0})).fields["next"]
    return await caller.pool(), every, content, found, events


@pytest.mark.parametrize("case", CASES)
@fake_engine()
async def test_a_refused_member_leaves_all_as_they_were(caller: Caller, case: str) -> None:
    for count, at in MEMBERS:
        names = await begin(caller, count)
        code, make = CASES[case]
        wrong, right = make(names, at)
        before = await state(caller, names)
        await caller.refused(wrong, code)
        assert await state(caller, names) == before, (case, count, at)
        await caller.submit(right)


@fake_engine()
async def test_a_member_whose_pages_have_other_names_leaves_all_without_a_name(
    caller: Caller,
) -> None:
    for count, at in MEMBERS:
        names = await begin(caller, count)
        await caller.submit(commit([names[at]], [list(range(900, 900 + PAGE))]))
        before = await state(caller, names)
        await caller.refused(commit(names, [prompt(i) for i in range(count)]), "key_mismatch")
        assert await state(caller, names) == before, (count, at)


@pytest.mark.parametrize("operation", ["append", "fork"])
@fake_engine()
async def test_a_member_without_pages_leaves_all_as_they_were(
    caller: Caller, operation: str
) -> None:
    """All but the last have room: each takes a page of its own."""
    for count in (1, 2, 3, 9):
        names = await begin(caller, count)
        if operation == "fork":
            await caller.submit(cut(names, [1] * count))
        await caller.create("rest")
        tokens = (GEOMETRY.num_pages - 2 * count + 1) * PAGE
        fill = {"layers": [*LAYERS], "sequences": ["rest"], "append_indptr": [0, tokens]}
        k = np.zeros((2, tokens, *rows(0, 1).shape[1:]), np.float32)
        await caller.call("append", fill, k=k, v=k)
        before = await state(caller, names)
        call = append(names) if operation == "append" else creation(*forks(names))
        await caller.refused(call, "out_of_pages")
        assert await state(caller, names) == before, count
        await caller.call("delete_sequence", {"id": "rest"})
        await caller.submit(call)
