"""The operation `snapshot`: one moment of the whole pool, not too often, and for operators only."""

from __future__ import annotations

import asyncio

import numpy as np

from service.engine.store.snapshot import LEAST_S
from tests.engine.harness import Caller, NewCall, append, delete, fake_engine, until


@fake_engine()
async def test_a_snapshot_agrees_with_the_pool(caller: Caller) -> None:
    await caller.create("a")
    await caller.submit(append("a", 9))
    reply = await caller.call("snapshot")
    pool = (await caller.call("pool")).fields
    for name in ("free", "referenced", "cached", "pinned", "total", "sequences", "leases"):
        assert reply.fields[name] == pool[name], name
    states = reply.tensors["page_states"]
    assert np.bincount(states, minlength=4).tolist() == [pool["free"], 3, 0, 0]
    assert reply.fields["namespaces"] == ["default"]
    assert reply.tensors["tree_totals"].tolist() == [3, 3]
    assert reply.tensors["tree_parents"].tolist() == [-1, 0]
    assert (reply.tensors["tree_idle_s"] < 5.0).all()


@fake_engine()
async def test_who_asks_too_soon_gets_the_last_one_again(caller: Caller) -> None:
    first = await caller.call("snapshot")
    await caller.create("a")
    again = await caller.call("snapshot")
    assert again.fields == first.fields and again.fields["sequences"] == 0
    await asyncio.sleep(LEAST_S)
    assert (await caller.call("snapshot")).fields["sequences"] == 1
    await caller.submit(delete("a"))


@fake_engine()
async def test_an_answer_that_does_not_fit_says_what_would(caller: Caller) -> None:
    refused = await caller.refused(NewCall("snapshot"), room=64)
    reply = await caller.submit(NewCall("snapshot"), room=refused.needed)
    assert reply.fields["free"] == 32


@fake_engine(live=False)
async def test_a_service_that_shows_nothing_live_takes_no_snapshots(caller: Caller) -> None:
    await caller.refused(NewCall("snapshot"), status=422, field="server.live")


@fake_engine()
async def test_watching_is_not_seen_in_the_latencies(caller: Caller) -> None:
    await caller.create("a")
    await caller.call("info")
    for _ in range(3):
        await caller.call("snapshot")
    await caller.call("info")
    await until(lambda: caller.metric("attnd_queue_duration_seconds_count") == 3)


@fake_engine(
    keys={"user": ("ours", ["read", "append"]), "operator": ("ops", ["admin"])}, key="user"
)
async def test_it_takes_the_scope_admin_and_names_no_sequence(
    user: Caller, operator: Caller
) -> None:
    await user.create("secret")
    await user.submit(append("secret", 5))
    await user.refused(NewCall("snapshot"), "forbidden", status=403)
    reply = await operator.call("snapshot")
    assert reply.fields["namespaces"] == ["ours"] and reply.fields["referenced"] == 2
    assert "secret" not in str(reply)
