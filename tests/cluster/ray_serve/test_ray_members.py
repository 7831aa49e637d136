"""Which engines an ingress on Ray writes down: all that should be there, until they have ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.settings import load_settings
from service.cluster.membership.members_file import read_members
from service.cluster.ray.directory import SILENT_S, Place

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="attnd[ray] is not installed"),
]


@pytest.fixture
def ingress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As it is before it has heard of any engine, on node `here`."""
    from service.cluster.ray import ingress_replica as ray_ingress

    made: Any = SimpleNamespace(
        settings=load_settings(["--cluster.engines", "2"]),
        addresses=SimpleNamespace(members=tmp_path / "members"),
        node="here",
        known={},
        seen_s={},
        began_s=0.0,
        is_settled=False,
    )
    made.update = partial(ray_ingress.IngressReplica.update, made)
    made.ended = partial(ray_ingress.IngressReplica.ended, made)
    nodes = [{"NodeID": name, "Alive": name != "dead"} for name in ("here", "there", "dead")]
    monkeypatch.setattr(ray_ingress.ray, "nodes", lambda: nodes)
    return made


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "own.sock"))
        sock.listen()
        yield sock


def place(name: str, node: str = "here", path: str = "/nowhere", **given: Any) -> Place:
    return Place(name, node, path, f"tcp:{name}:1", **given)


def names(ingress: Any) -> list[str]:
    members = ingress.addresses.members
    return sorted(one.name for one in read_members(members)) if members.exists() else []


def test_engines_are_written_down_once_all_that_should_be_there_are(ingress: Any) -> None:
    ingress.update([place("a")], (), 5.0)
    assert names(ingress) == []
    ingress.update([place("a"), place("b", path="/other")], (), 6.0)
    assert names(ingress) == ["a", "b"]


def test_an_engine_that_does_not_come_is_waited_for_a_minute(ingress: Any) -> None:
    ingress.update([place("a")], (), 59.0)
    assert names(ingress) == []
    ingress.update([place("a")], (), 61.0)
    assert names(ingress) == ["a"]


def test_an_engine_is_forgotten_when_it_has_ended_and_not_when_it_is_silent(
    ingress: Any, listener: socket.socket
) -> None:
    own = listener.getsockname()
    every = [
        place("silent", path=own),
        place("ended", path="/ended"),
        place("moved", path="/taken"),
        place("on a dead node", node="dead", path=own),
        place("leaving", path=own, is_leaving=True),
        place("left", is_leaving=True),
    ]
    ingress.update(every, (), 10.0)
    new = [place("new", path="/taken")]
    soon, late = 10.0 + SILENT_S / 2, 11.0 + SILENT_S
    assert ingress.ended(new, soon) == {"left"}
    ended = ingress.ended(new, late)
    assert ended == {"ended", "moved", "on a dead node", "left"}
    ingress.update(new, ended, late)
    assert names(ingress) == ["leaving", "new", "silent"]


@pytest.mark.filterwarnings("ignore")  # what Ray does as it is imported is its own
async def test_an_engine_is_reported_from_its_first_reply_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from service.cluster.ray import engine_replica

    replies: list[int | None] = [None, None, 0]
    reported: list[int] = []

    async def num_left() -> int | None:
        return replies.pop(0)

    async def report(_: str) -> None:
        reported.append(len(replies))

    monkeypatch.setattr(engine_replica, "REPORT_S", 0.02)
    made: Any = SimpleNamespace(
        num_left=num_left,
        has_replied=False,
        place="a place",
        process=SimpleNamespace(running=SimpleNamespace(poll=lambda: None)),
        directory=SimpleNamespace(report=SimpleNamespace(remote=report)),
    )
    watching = asyncio.ensure_future(engine_replica.EngineReplica.watch(made))
    await engine_replica.EngineReplica.meet(made)
    async with asyncio.timeout(10):
        while not reported:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert set(reported) == {0}
