"""Engines that keep no events: a door that has used prefixes can call them again."""

from __future__ import annotations

from typing import Any

import pytest

from service.cluster.membership import polling
from service.doors.kit.problems import ProblemText
from service.errors import InvalidRequest, problem
from service.image.json_text import dump_json
from tests.cluster.harness import Cluster


async def test_a_door_that_uses_prefixes_gets_a_new_session_with_an_engine_that_keeps_no_events(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, refusal = polling.ask, InvalidRequest("cache.events_history", 0, "keeps no events")

    async def without_events(engine: Any, name: str, *rest: Any, **fields: Any) -> Any:
        if name == "events":
            raise ProblemText(dump_json(problem(refusal)))
        return await ask(engine, name, *rest, **fields)

    monkeypatch.setattr(polling, "ask", without_events)
    new = {"id": "new", "prefix": {"token_ids": list(range(8))}}
    await cluster.ok("create_sequences", {"sequences": [new]})
    members = cluster.router.members
    for member in members.by_name.values():
        members.disconnect(member, "a test")
    await cluster.until(lambda: len(members.engines) == 2, "sessions with all engines")
    await cluster.ok("delete_sequence", {"id": "new"})
