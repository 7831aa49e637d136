"""Engines that join a running cluster, and polls of engines with much to report."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from service.cluster.membership import polling
from service.cluster.membership import sessions as sessions_module
from service.cluster.membership.engine import EngineSession
from service.cluster.membership.roster import RosterEntry
from service.core.keys import KEY_BYTES
from service.core.pool.named_pages import Stored
from service.doors.kit.upstream import EngineReply
from service.engine.store.event_history import PAGES_AN_EVENT, EventHistory
from service.errors import NotReady
from service.metrics import MOST_ENGINES, Metrics
from tests.cluster.fake_engines import INFO, FakeLink, fake_cluster
from tests.cluster.harness import num_pages
from tests.harness.router import read_page


async def test_a_door_that_is_ready_stays_ready_while_an_engine_that_joins_starts() -> None:
    async with fake_cluster("a") as cluster:
        members = cluster.router.members
        known = RosterEntry("a", "/a")
        assert members.state == ("ready", "ready")
        cluster.router.sessions.update([known, RosterEntry("b", "/not-there")])
        await asyncio.sleep(0.01)
        assert members.state == ("ready", "ready")


@pytest.mark.parametrize("is_draining", [False, True])
async def test_engines_that_end_with_the_router_are_not_reported_as_lost(
    is_draining: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster("ab") as cluster:
        cluster.router.draining = "the service stops" if is_draining else ""
        cluster.lose("a", is_dead=True)
    assert ("a is lost" in caplog.text) != is_draining


async def test_an_engine_that_replies_to_each_question_of_a_long_poll_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "SILENT_S", 0.2)
    view = dict.fromkeys(
        ("referenced", "pinned", "free", "cached", "page_s", "pair_s", "read_s"), 0
    )
    async with fake_cluster("a") as cluster:
        link, engine = cluster.links["a"], cluster.engine_of("a")
        link.replies["engines"] = {"engines": [view | {"draining": False, "sequences": 0}]}
        link.replies["events"] = {"events": [], "next": 1, "too_old": False}
        members, member = cluster.router.members, cluster.router.members.by_name["a"]
        for number in range(12):
            members.prefixes_of(f"tenant-{number}")

        async def slowly() -> None:
            await asyncio.sleep(0.05)
            assert not engine.is_silent

        link.do_next("events", *[slowly] * 12)
        await polling.poll_to_the_end(members, member, engine)
        assert len(link.calls("events")) == 12

        async def stalls() -> None:
            await asyncio.sleep(0.4)
            assert engine.is_silent

        link.do_next("events", stalls)
        await polling.poll_to_the_end(members, member, engine)
        assert not engine.is_silent


def test_the_first_engines_are_still_measured_after_many_others_have_come() -> None:
    metrics = Metrics()
    pages = {"free": 1}
    for number in range(MOST_ENGINES + 3):
        metrics.engine(f"engine-{number}", pages, 0, 0.0, 0)
    metrics.engine("engine-0", {"free": 7}, 0, 0.0, 0)
    text = metrics.render()[0].decode()
    assert 'attnd_engine_kv_pages{door="main",engine="engine-0",state="free"} 7.0' in text


async def test_one_poll_reads_all_events_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    history, page_size, num_prompts = EventHistory(16, 10**6), 16, 40
    rng = np.random.default_rng(0)
    for _ in range(num_prompts):
        ids = rng.integers(0, 2**31, PAGES_AN_EVENT * page_size, np.uint32).tobytes()
        history.hear(
            Stored("default", rng.bytes(PAGES_AN_EVENT * KEY_BYTES), bytes(KEY_BYTES), ids)
        )
    questions = 0

    async def ask(engine: Any, name: str, tenant: Any, after: int) -> EngineReply:
        nonlocal questions
        questions += 1
        events, following, too_old = read_page(history, "default", after, 1000)
        return EngineReply({"events": events, "next": following, "too_old": too_old}, {}, ())

    monkeypatch.setattr(polling, "ask", ask)
    async with fake_cluster("a") as cluster:
        members, member = cluster.router.members, cluster.router.members.by_name["a"]
        known = members.prefixes_of("default")
        await polling.read_events(members, member, cluster.engine_of("a"), "default")
        assert num_pages(known, "GPU") == num_prompts * PAGES_AN_EVENT
        before = questions
        history.hear(Stored("default", rng.bytes(KEY_BYTES), bytes(KEY_BYTES), None))
        await polling.read_events(members, member, cluster.engine_of("a"), "default")
        assert questions == before + 2, "an empty page is the last"


async def test_two_readers_of_the_same_events_log_each_once() -> None:
    async with fake_cluster("a") as cluster:
        link, members = cluster.links["a"], cluster.router.members
        page = {"namespace": "default", "page_keys": ["0"]}
        events = [page | {"type": "stored"}, page | {"type": "removed"}]
        link.replies["events"] = {"events": events, "next": 2, "too_old": False}
        known, arrived = members.prefixes_of("default"), asyncio.Event()
        link.do_next("events", arrived.wait, arrived.wait)
        reading = asyncio.gather(*(polling.follow(members, "default") for _ in range(2)))
        while len(link.calls("events")) < 2:
            await asyncio.sleep(0)
        arrived.set()

        async def nothing_new() -> None:
            link.replies["events"] = {"events": [], "next": 2, "too_old": False}

        link.do_next("events", nothing_new)
        await reading
        assert [one["type"] for one in known.log.events] == ["stored", "removed"]


STORED: Final = {"namespace": "default", "page_keys": ["0"], "type": "stored"}


async def test_a_reply_with_events_that_waited_while_its_session_ended_is_not_read() -> None:
    async with fake_cluster("a") as cluster:
        link, members = cluster.links["a"], cluster.router.members
        known, engine = members.prefixes_of("default"), cluster.engine_of("a")

        async def ends() -> None:
            cluster.lose("a", is_dead=True)
            link.state = "lost", "it ended"

        link.replies["events"] = {"events": [STORED], "next": 1, "too_old": False}
        link.do_next("events", ends)
        with pytest.raises(NotReady, match="it ended"):
            await polling.read_events(members, members.by_name["a"], engine, "default")
        assert num_pages(known, "GPU") == 0


async def test_pages_of_an_engine_that_ends_as_the_router_meets_it_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_cluster("a") as cluster:
        members, sessions = cluster.router.members, cluster.router.sessions
        known, link = members.prefixes_of("default"), FakeLink(cluster.router.arena)

        async def done(*_: object, **__: object) -> EngineReply:
            return EngineReply({}, {}, ())

        async def poll(_: object, __: object, engine: EngineSession) -> None:
            known.add(engine.tag, dict(STORED))
            raise NotReady("it ended")

        other = SimpleNamespace(
            model_validate=lambda _: INFO.model_copy(update={"instance_id": "b"})
        )
        monkeypatch.setattr(link, "connect", done, raising=False)
        for name, value in (("Link", lambda *_, **__: link), ("ask", done), ("poll", poll)):
            monkeypatch.setattr(sessions_module, name, value)
        monkeypatch.setattr(sessions_module, "InfoAnswer", other)
        with pytest.raises(NotReady):
            await sessions.connect(members.by_name["a"])
        assert num_pages(known, "GPU") == 0


@pytest.mark.parametrize("name", ["dtype", "k_scale", "v_scale"])
async def test_an_engine_that_stores_other_numbers_is_refused(name: str) -> None:
    async with fake_cluster("ab") as cluster:
        b = cluster.router.members.by_name["b"]
        other = cluster.engine_of("b")
        other.info = INFO.model_copy(update={name: 2.0})
        with pytest.raises(NotReady, match=rf"pool\.{name} = 2\.0, expected"):
            cluster.router.sessions.check_alike(b, other)


async def test_engines_of_another_geometry_can_replace_all_engines() -> None:
    async with fake_cluster("ab") as cluster:
        members = cluster.router.members
        a, b = members.by_name.values()
        old, new = cluster.engine_of("b"), cluster.engine_of("a")
        new.info = INFO.model_copy(update={"page_size": 2 * INFO.page_size})
        new.tag = "restarted"
        cluster.lose("a", is_dead=False)
        with pytest.raises(NotReady, match=r"pool\.page_size = 8, expected 4"):
            cluster.router.sessions.check_alike(a, new)
        assert a.is_dead, "another engine has its address"
        cluster.lose("b", is_dead=False)
        with pytest.raises(NotReady, match=r"pool\.page_size = 8, expected 4"):
            cluster.router.sessions.check_alike(a, new)
        members.mark_dead(b)
        cluster.router.sessions.check_alike(a, new)
        assert members.info is new.info
        a.engine = new
        with pytest.raises(NotReady, match=r"pool\.page_size = 4, expected 8"):
            cluster.router.sessions.check_alike(b, old)
        assert members.info is new.info
