"""Engines that die or hang: which calls fail, how, and when."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.cluster.harness import SETTINGS, Cluster, run
from tests.cluster.local_engines import local_engines

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def engines():  # type: ignore[no-untyped-def]
    with local_engines(2, SETTINGS) as found:
        yield found


def test_lost_sequences_are_listed_by_id_and_their_ids_may_be_reused(engines) -> None:  # type: ignore[no-untyped-def]
    async def check(cluster: Cluster) -> None:
        names = [f"chat-{n}" for n in range(4)]
        await cluster.ok("create_sequences", {"sequences": [{"id": name} for name in names]})
        ids = names + await cluster.create(4)
        lost_ids = [name for name in ids if cluster.home(name) == "engine-0"]
        kept = [name for name in ids if name not in lost_ids]
        engines.kill("engine-0")
        lost = await cluster.call("gather", {"layer": 0, "sequences": ids})
        assert (lost.status, lost.fields["code"]) == (410, "lost_sequence")
        assert set(lost.fields["sequences"]) == set(lost_ids)
        await cluster.ok("gather", {"layer": 0, "sequences": kept})
        await cluster.ok("create_sequences", {"sequences": [{"id": lost_ids[0]}]})
        assert cluster.home(lost_ids[0]) == "engine-1"
        engines.start("engine-0")
        members = cluster.router.members
        await cluster.until(lambda: len(members.engines) == 2, "the restarted engine")
        still = await cluster.call("get_sequence", {"id": lost_ids[-1]})
        assert still.status == 410
        assert (await cluster.fields("list_sequences"))["next"] is None

    run(engines, check)


def test_an_engine_that_hangs_delays_no_call_beyond_its_deadline(engines) -> None:  # type: ignore[no-untyped-def]
    async def check(cluster: Cluster) -> None:
        there: list[str] = []
        elsewhere: list[str] = []
        while not (there and elsewhere):  # where they go is for the placement to say
            for name in await cluster.create(4):
                (there if cluster.home(name) == "engine-1" else elsewhere).append(name)
            assert len(there) + len(elsewhere) <= 256, "one engine gets all of them"
        hung = engines.processes["engine-1"]
        hung.send_signal(signal.SIGSTOP)
        try:
            await cluster.ok("gather", {"layer": 0, "sequences": elsewhere})
            slow = asyncio.ensure_future(
                cluster.call("gather", {"layer": 0, "sequences": there}, deadline_s=0.2)
            )
            await cluster.ok("create_sequences", {"sequences": [{"parent": elsewhere[0]}]})
        finally:
            hung.send_signal(signal.SIGCONT)
        assert (await slow).status in (200, 504)

    run(engines, check)
