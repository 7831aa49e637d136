"""Token ids in calls: pages get their names with the last layer's rows, and never before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.core.keys import Prefix
from service.core.values import SequenceView
from service.engine.loop import scheduler as scheduler_module
from service.engine.loop.job import Job
from service.errors import Cancelled
from tests.engine.fake_backend import GEOMETRY, FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    code,
    creation,
    decode,
    delete,
    fake_engine,
    held_back,
    queries,
    rows,
    truncate,
    until,
)
from tests.engine.loop.test_open_steps import HandLane, Rig

SIZE = GEOMETRY.page_size
LAYERS = [0, 1]
CHAINED = {"prefix": {"token_ids": []}}


def ids(*given: int) -> Any:
    return np.array(given, np.uint32)


async def begin(caller: Caller, *names: str) -> None:
    await caller.submit(creation(*({"id": name} | CHAINED for name in names)))


async def lens(caller: Caller, name: str) -> tuple[int, int]:
    view = await caller.view(name)
    return view["known_len"], view["committed_len"]


async def cached(caller: Caller, *tokens: int) -> int:
    found = await caller.call("match_prefix", {"token_ids": list(tokens), "lease_s": 0.0})
    matched: int = found.fields["matched_len"]
    return matched


def prefill(name: str, n: int, layer: int, **fields: Any) -> NewCall:
    tensors = {"q": queries(1, n), "k": rows(2, n), "v": rows(3, n)}
    given = {"layer": layer, "sequences": [name], "qo_indptr": [0, n], "causal": True}
    return NewCall("prefill", given, tensors).but(**fields)


def every_layer(name: str, n: int, **fields: Any) -> NewCall:
    k, v = (np.stack([rows(seed, n)] * 2) for seed in (1, 2))
    given = {"layers": LAYERS, "sequences": [name], "append_indptr": [0, n]}
    return NewCall("append", given, {"k": k, "v": v}).but(**fields)


WAYS = {  # of 6 rows with ids, at both layers, and what each reply says is committed
    "append": ([append("a", 6, layer).but(token_ids=ids(*range(6))) for layer in LAYERS], [0, 4]),
    "first layer": ([append("a", 6).but(token_ids=ids(*range(6))), append("a", 6, 1)], [0, None]),
    "field": ([append("a", 6, layer, token_ids=[*range(6)]) for layer in LAYERS], [0, 4]),
    "layers": ([every_layer("a", 6, token_ids=ids(*range(6)))], [4]),
    "prefill": ([prefill("a", 6, layer, token_ids=ids(*range(6))) for layer in LAYERS], [0, 4]),
    "chunks": ([prefill("a", 3, at % 2, token_ids=[*range(at // 2 * 3, at // 2 * 3 + 3)])
                for at in range(4)], [0, 0, 0, 4]),
    "later": ([every_layer("a", 6), decode("a", token_ids=ids(*range(6)))], [None, 4]),
    "cut": ([every_layer("a", 8), truncate("a", 0).but(keep=[*range(6)], token_ids=[*range(6)])],
            [None, 4]),
    "batch": ([every_layer("a", 8), NewCall("truncate_sequences", {
        "sequences": ["b", "a"], "lengths": [0, 6],
        "token_ids": [*range(6)], "ids_indptr": [0, 0, 6]})], [None, [0, 4]]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@fake_engine()
async def test_a_page_is_committed_by_itself_in_every_way_in(caller: Caller, way: str) -> None:
    calls, committed = WAYS[way]
    await begin(caller, "a", "b")
    for call, wanted in zip(calls, committed, strict=True):
        reply = (await caller.submit(call)).fields
        views = reply.get("sequences", [reply])
        found = [view.get("committed_len") for view in views]
        found = [one[0] if isinstance(one, list) else one for one in found]
        if "sequences" not in reply and "id" not in reply:
            assert ("known_len" in reply) == (wanted is not None)
        if wanted is not None:
            assert found == (wanted if isinstance(wanted, list) else [wanted])
    assert await lens(caller, "a") == (6, 4)
    assert await cached(caller, *range(8)) == SIZE
    assert (await caller.pool())["integrity"] == "ok"
    await caller.submit(delete("a"))
    assert await cached(caller, *range(8)) == SIZE


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["attend", "result"])
@fake_engine()
async def test_a_failed_launch_names_no_page_and_no_token(
    caller: Caller, backend: FakeBackend, stage: str, late: bool
) -> None:
    await begin(caller, "a")
    await caller.submit(every_layer("a", 3, token_ids=ids(0, 1, 2)))
    last = [decode("a", new=True, layer=layer).but(token_ids=ids(3)) for layer in LAYERS]
    bug = RuntimeError("a bug")
    for failures, answers, known in (
        ([bug, None, bug], ["ok", "internal"], (4, 0)),
        ([bug, bug], ["internal", "ok"], (4, 4)),
    ):
        backend.failures[stage] = list(failures)
        # shared, they fail; one by one, the second or the first of them fails again
        replies = await held_back(caller, backend, *last)
        assert [code(one) for one in replies] == answers
        assert (await lens(caller, "a"))[1] == 0, known
        assert await cached(caller, *range(4)) == 0
        await caller.submit(truncate("a", 3))
        assert await lens(caller, "a") == (3, 0)
    for call in last:
        assert await caller.code(call.but(token_ids=ids(9))) == "ok"
    assert await lens(caller, "a") == (4, 4)
    assert (await cached(caller, 0, 1, 2, 9), await cached(caller, *range(4))) == (SIZE, 0)


@fake_engine(late=True)
async def test_rows_of_a_launch_under_way_do_not_count(
    caller: Caller, backend: FakeBackend
) -> None:
    """The first layer's launch is answered while the second's, which fails, is on the device."""
    await begin(caller, "a")
    await caller.submit(every_layer("a", 3, token_ids=ids(0, 1, 2)))
    gates = backend.step_by_step()
    first = caller.start(decode("a", new=True, token_ids=ids(3)))
    await until(lambda: len(gates) == 2)  # of its rows and its attention
    backend.failures["result"] = [RuntimeError("a bug"), RuntimeError("a bug")]
    second = caller.attempt(decode("a", new=True, layer=1))
    await until(lambda: len(gates) == 4)
    gates[0].set()
    gates[1].set()
    assert (await first).fields["committed_len"] == [0]
    backend.let_all()
    assert code(await second) == "internal"
    assert await cached(caller, *range(4)) == 0
    assert await lens(caller, "a") == (4, 0)
    assert (await caller.pool())["integrity"] == "ok"


WRONG = [
    (append("plain", 1).but(token_ids=ids(3)), "invalid_request", "token_ids"),
    (append("a", 1).but(token_ids=ids(1, 2, 3)), "invalid_request", "token_ids"),
    (append("a", 2).but(token_ids=ids(9, 9), ids_indptr=[0, 3]), "invalid_request", "ids_indptr"),
    (append("a", 1).but(ids_indptr=[0, 0]), "invalid_request", "ids_indptr"),
    (append("a", 1, token_ids=[1]).but(token_ids=ids(1)), "invalid_request", "token_ids"),
    (decode("a", "plain", token_ids=[2, 5]), "invalid_request", "token_ids"),
    (decode("empty", token_ids=[2]), "invalid_request", "token_ids"),
    (decode("a", "plain", token_ids=[1, 2, 3]), "invalid_request", "token_ids"),
    (decode("a", token_ids=[9]), "key_mismatch", None),
    (decode("a", token_ids=[2**32]), "invalid_request", "token_ids.0"),
    (truncate("a", 2).but(token_ids=[9]), "invalid_request", "token_ids"),
    (truncate("a", 1).but(layer=0, token_ids=[1]), "invalid_request", "token_ids"),
    (NewCall("truncate_sequences", {"sequences": ["a"], "lengths": [1], "token_ids": [1]}),
     "invalid_request", "ids_indptr"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "field"), WRONG)
@fake_engine()
async def test_ids_that_contradict_or_belong_to_no_token_change_nothing(
    caller: Caller, call: NewCall, error: str, field: str | None
) -> None:
    await caller.create("plain")
    await begin(caller, "a", "empty")
    await caller.submit(every_layer("a", 3, token_ids=ids(0, 1, 2)))
    before = [await caller.pool(), await caller.view("a"), await caller.view("plain")]
    refused = await caller.refused(call, error, **({"field": field} if field else {}))
    assert refused.status == (409 if error == "key_mismatch" else 422)
    assert [await caller.pool(), await caller.view("a"), await caller.view("plain")] == before


@fake_engine(keys={"ours": ("ours", ["read", "append"]), "reader": ("ours", ["read"])}, key="ours")
async def test_a_key_that_only_reads_names_no_tokens(ours: Caller, reader: Caller) -> None:
    await begin(ours, "a")
    await ours.submit(every_layer("a", 4))
    call = decode("a", token_ids=[0, 1, 2, 3])
    await reader.refused(call, "forbidden", scope="append")
    assert await ours.code(call) == "ok" and await lens(ours, "a") == (4, 4)


@fake_engine()
async def test_many_pages_are_named_some_at_a_time_behind_the_reply(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "NAMING_S", 0.0)
    names = [f"s{number}" for number in range(6)]
    await begin(caller, *names)
    for layer in LAYERS:
        call = NewCall("append", {"layer": layer, "sequences": names}, {})
        indptr = [SIZE * at for at in range(len(names) + 1)]
        tensors = {name: rows(at, SIZE * len(names)) for at, name in enumerate("kv")}
        given = ids(*range(SIZE * len(names)))
        reply = await caller.submit(call.but(append_indptr=indptr, token_ids=given, **tensors))
    assert sum(reply.fields["committed_len"]) == SIZE, "the others are named in later rounds"
    for name in names:
        while (await lens(caller, name))[1] < SIZE:
            await caller.pool()


def test_an_aborted_step_names_nothing_and_the_step_before_it_what_it_stored() -> None:
    rig, lane = Rig(), HandLane()
    rig.ask(creation({"id": "c"} | CHAINED))
    rig.run()

    def step(*tokens: int) -> Job:
        job = rig.step(lane, "c", op="prefill", qo_indptr=[0, len(tokens)], token_ids=[*tokens])
        assert rig.opened[-1]["known_len"] == [view().length]
        return job

    def view() -> SequenceView:
        return rig.store.tree.describe("c")

    def abort(job: Job) -> None:
        rig.scheduler.cancel(job)
        rig.run(3)
        assert isinstance(job.error, Cancelled)

    step(0, 1, 2)
    second = step(3)
    lane.runs[0].done = True
    rig.run()
    assert (view().known_len, view().committed_len) == (4, 0), "its last row may be undone"
    abort(second)
    assert (view().length, view().known_len, view().committed_len) == (3, 3, 0)
    lane = HandLane()
    step(9)
    fourth = step(10)
    lane.runs[0].done = True
    rig.run()
    assert (view().known_len, view().committed_len) == (5, 4), "the page ends before the open step"
    abort(fourth)
    assert (view().length, view().known_len, view().committed_len) == (4, 4, 4)
    rig.store.tree.check_integrity()
    assert rig.store.tree.cache.match("default", Prefix(ids(0, 1, 2, 9))).num_pages == 1
