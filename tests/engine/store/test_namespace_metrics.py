"""The metrics of each namespace, as an engine counts them."""

from __future__ import annotations

import pytest

from service.engine.loop import stats
from tests.engine.fake_backend import FakeBackend
from tests.engine.harness import Caller, append, creation, decode, fake_engine, until

PAGE = FakeBackend().geometry.page_size
KEYS = {name: (name, ["read", "append"]) for name in ("ours", "theirs")}
PAGES = ("referenced", "cached", "pinned")
counted = fake_engine(keys=KEYS, key="ours", max_sequences=4, namespace_share=0.5)


@pytest.fixture(autouse=True)
def hold_is_counted_with_every_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "HELD_S", 0.0)
    monkeypatch.setattr(stats, "HELD_SHARE", 1e9)


def series(caller: Caller, name: str, namespace: str, rest: str = "") -> float:
    return caller.metric(f'attnd_namespace_{name}{{namespace="{namespace}"{rest}}}')


@counted
async def test_pages_calls_tokens_and_rejections_are_counted_for_their_namespace(
    ours: Caller, theirs: Caller
) -> None:
    await theirs.create("b")
    await ours.create("a")
    prompt = list(range(2 * PAGE))
    for layer in range(2):
        await ours.submit(append("a", len(prompt) + 1, layer=layer))
    await ours.call("commit", {"id": "a", "token_ids": prompt})
    await ours.call("delete_sequence", {"id": "a"})
    for asked in (prompt, prompt[::-1]):
        await ours.call("match_prefix", {"token_ids": asked, "lease_s": 0.0})
    await theirs.submit(append("b", 3))
    await theirs.submit(decode("b"))
    too_many = theirs.engine.store.geometry.num_pages * PAGE + 1
    await theirs.refused(append("b", too_many), "out_of_pages")
    await theirs.refused(creation({}, {}, {}), "out_of_sequences")
    await until(lambda: series(theirs, "requests_total", "theirs") == 5)
    pages = {state: series(ours, "kv_pages", "ours", f',state="{state}"') for state in PAGES}
    assert pages == {"referenced": 0, "cached": 2, "pinned": 0}
    for name, namespace, rest, value in (
        ("kv_pages", "theirs", ',state="referenced"', 1),
        ("sequences", "theirs", "", 1),
        ("requests_total", "ours", "", 7),
        ("rejected_total", "theirs", ',reason="out_of_pages"', 1),
        ("rejected_total", "theirs", ',reason="out_of_sequences"', 1),
        ("rejected_total", "ours", ',reason="out_of_pages"', 0),
        ("tokens_appended_total", "ours", "", 2 * (2 * PAGE + 1)),
        ("tokens_appended_total", "theirs", "", 3),
        ("prefix_tokens_total", "ours", ',result="hit"', 2 * PAGE),
        ("prefix_tokens_total", "ours", ',result="miss"', 2 * PAGE),
    ):
        assert series(ours, name, namespace, rest) == value, (name, namespace, rest)
    assert series(ours, "queue_seconds_total", "theirs") > 0
