"""Which engines the router's replica on Ray writes down: all that should be there, until Ray says
that they are dead."""

from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.settings import load_settings
from service.cluster.membership.roster import read_roster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="attnd[ray] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # what Ray does as it is imported is its own
]


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As it is before it has heard of any engine, on node `here`; actors named `dead` are."""
    from service.cluster.ray import router_replica as module

    def get_actor(name: str, namespace: str) -> None:
        if name == "dead":
            raise ValueError("no actor of that name")

    monkeypatch.setattr(module.ray, "get_actor", get_actor)
    monkeypatch.setattr(module, "REPORT_S", 0.01)
    made: Any = SimpleNamespace(
        settings=load_settings(["--cluster.engines", "2"]),
        addresses=SimpleNamespace(roster=tmp_path / "roster"),
        node="here",
        known={},
        written=None,
        began_s=time.monotonic() - 10.0,
        is_over=False,
    )
    for name in ("write", "report", "leave", "end", "watch"):
        setattr(made, name, getattr(module.RouterReplica, name).__get__(made))
    return made


def place(name: str, actor: str = "alive", node: str = "here", **given: Any) -> Any:
    from service.cluster.ray.router_replica import Place

    return Place(name, (actor, "serve"), node, f"/{name}", f"tcp:{name}:1", **given)


def written(router: Any) -> dict[str, str]:
    path = router.addresses.roster
    return {one.name: one.address for one in read_roster(path)} if path.exists() else {}


def test_engines_are_written_down_once_all_that_should_be_there_are(router: Any) -> None:
    router.report(place("a"))
    router.write(5.0)
    assert written(router) == {}
    router.report(place("b", node="there"))
    router.write(6.0)
    assert written(router) == {"a": "/a", "b": "tcp:b:1"}
    router.leave("a")
    router.write(7.0)
    assert written(router) == {"b": "tcp:b:1"}


def test_an_engine_that_does_not_come_is_waited_for_a_minute(router: Any) -> None:
    router.report(place("a"))
    router.write(59.0)
    assert written(router) == {}
    router.write(61.0)
    assert written(router) == {"a": "/a"}


async def test_an_engine_is_forgotten_when_ray_says_that_it_is_dead_and_not_when_it_is_silent(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.cluster.ray import router_replica as module

    for one in (place("silent"), place("dead", actor="dead"), place("new", actor="dead")):
        router.report(one)
    watching = asyncio.ensure_future(router.watch())
    await asyncio.sleep(0.1)
    assert set(written(router)) == {"silent", "dead", "new"}, "they have reported just now"
    monkeypatch.setattr(module, "QUIET_S", 0.3)
    async with asyncio.timeout(10):
        while set(written(router)) != {"silent", "new"}:
            router.report(place("new", actor="dead"))
            await asyncio.sleep(0.01)
    watching.cancel()
    assert not router.report(place("new"))
    router.end()
    assert router.report(place("new")), "an engine learns that the whole cluster stops"


async def test_an_engine_is_reported_from_its_first_reply_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from service.cluster.ray import engine_replica

    replies: list[int | None] = [None, None, 0]
    reported = asyncio.Event()

    async def num_left() -> int | None:
        return replies.pop(0)

    async def report() -> None:
        assert not replies
        reported.set()

    monkeypatch.setattr(engine_replica, "REPORT_S", 0.02)
    made: Any = SimpleNamespace(
        num_left=num_left,
        has_replied=False,
        report=report,
        processes=SimpleNamespace(check=lambda: None),
    )
    watching = asyncio.ensure_future(engine_replica.EngineReplica.watch(made))
    async with asyncio.timeout(10):
        await reported.wait()
    watching.cancel()


async def test_an_engine_that_leaves_has_time_to_write_to_its_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from service.cluster.ray import engine_replica

    settings, ended = load_settings(["--server.drain-timeout-s", "7"]), list[float]()

    async def nothing(*_: Any) -> int:
        return 0

    left = SimpleNamespace(leave=SimpleNamespace(remote=nothing))
    monkeypatch.setattr(engine_replica, "REPORT_S", 0.01)
    monkeypatch.setattr(engine_replica.serve, "get_deployment_handle", lambda *_: left)
    made: Any = SimpleNamespace(
        settings=settings,
        name="engine",
        is_over=False,
        report=nothing,
        ask=nothing,
        num_left=nothing,
        watching=SimpleNamespace(cancel=lambda: None),
        processes=SimpleNamespace(end=lambda seconds=0.0: ended.append(seconds)),
        listening=SimpleNamespace(unlink=lambda: None),
        arena=SimpleNamespace(close=lambda: None),
    )
    await engine_replica.EngineReplica.__del__(made)
    assert ended == [7.0 + engine_replica.GRACE_S]
