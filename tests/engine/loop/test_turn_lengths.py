"""How long each operation at its largest size keeps the engine's thread in one pass of its loop.

It measures CPU time of that thread, to which other programs of a busy machine add nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from attnd.wire.bounds import MAX_BATCH, MAX_DELETED, MAX_NAMES, MAX_NEW, MAX_SEQUENCES

from kernels import make_backend
from kernels.backend import PoolGeometry
from service.engine.handlers import table
from service.engine.work.pace import RATES
from service.processes.watchdog import Watchdog
from tests.engine.harness import Caller, NewCall, Refused, creation, outcome, with_engine

pytestmark = pytest.mark.timing

GEOMETRY = PoolGeometry(2, 65536, 16, 1, 8, dtype="fp32")
PAGE = GEOMETRY.page_size
MAX_S = 0.2
"""A slice is 20 ms; a slow or busy processor may need several times as long."""
LOOP_S = 0.05
ROOM_BYTES = 2**24
ARENA_BYTES = 2**27
MADE = 15_000
DEEP = 1500
Pieces = Iterator[tuple[str, dict[str, Any], dict[str, Any]]]


class Passes:
    """CPU seconds of each pass of the engine's loop, and the longest of each operation's."""

    def __init__(self) -> None:
        self.before = 0.0
        self.seconds: list[float] = []
        self.longest: dict[str, float] = {}

    def passed(self) -> None:
        """In the engine's thread."""
        now = time.thread_time()
        self.seconds.append(now - self.before)
        self.before = now

    async def measure(self, caller: Caller, name: str, fields: Any, tensors: Any = None) -> None:
        """Send an operation when nothing else is under way."""
        await caller.call("get_namespace", {"name": "default"})
        del self.seconds[:]
        reply = await outcome(caller.submit(NewCall(name, fields, tensors or {}), room=ROOM_BYTES))
        await caller.call("get_namespace", {"name": "default"})
        assert not isinstance(reply, Refused) or reply.status == 413, (name, str(reply))
        assert not isinstance(reply, Exception) or isinstance(reply, Refused), (name, reply)
        self.longest[name] = max([self.longest.get(name, 0.0), *self.seconds])


def max_s() -> float:
    """`MAX_S` of a processor that counts to a million in `LOOP_S`; a slower one gets more."""
    times = []
    for _ in range(3):
        began, count = time.thread_time(), 0
        while count < 1_000_000:
            count += 1
        times.append(time.thread_time() - began)
    return MAX_S * max(1.0, min(times) / LOOP_S)


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    passes = Passes()
    was = Watchdog.passed

    def passed(watchdog: Watchdog, seconds: float) -> None:
        passes.passed()
        was(watchdog, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Watchdog, "passed", passed)
        yield passes


def rows(count: int, heads: int = 1) -> Any:
    return np.ones((count, heads, GEOMETRY.head_dim), np.float32)


def kv(count: int) -> dict[str, Any]:
    return {"k": rows(count), "v": rows(count)}


def ids(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def each(count: int, step: int = 1) -> list[int]:
    return list(range(0, count * step + 1, step))


def many(names: Sequence[str]) -> Pieces:
    """What takes many sequences, each row of which is one's."""
    count, first = len(names), {"layer": 0, "sequences": list(names)}
    for mode in ("auto", "always", "never"):
        yield "decode", first | {"cascade": mode}, {"q": rows(count, 2)}
    yield "decode", first, {"q": rows(count, 2)} | kv(count)
    yield "append", first, kv(count)
    yield "append", first, kv(count)
    prefill = first | {"qo_indptr": each(count), "causal": True}
    yield "prefill", prefill, {"q": rows(count, 2)} | kv(count)
    yield "gather", first | {"start": 0, "stop": 16}, {}
    yield "gather", first | {"stop": 0}, {}
    yield "page_table", {"sequences": list(names)}, {}
    yield "page_table", {"sequences": list(names[: count // 4])}, {}
    yield "list_sequences", {"limit": 1000}, {}
    yield "pool", {}, {}
    yield "snapshot", {}, {}


def cascades(names: Sequence[str]) -> Pieces:
    """Of sequences that share nothing, in one level and in four."""
    for num_levels in (1, 4):
        count = len(names) // num_levels
        levels = [
            {"sequences": names[first : first + count], "qo_indptr": each(count)}
            for first in range(0, num_levels * count, count)
        ]
        yield "cascade", {"layer": 0, "levels": levels}, {"q": rows(count, 2)}


def alone() -> Pieces:
    """What takes no sequences but rows of its own, and all that is in the pool."""
    sums = each(MAX_SEQUENCES)
    count = MAX_SEQUENCES
    yield "ragged_prefill", {"qo_indptr": sums, "kv_indptr": sums}, {"q": rows(count)} | kv(count)
    lse = np.ones((30_000, 1), np.float32)
    yield "merge", {"indptr": each(30_000)}, {"o": rows(30_000), "lse": lse}
    yield "match_prefix", {"lease_s": 0.0}, {"token_ids": np.arange(MAX_NAMES, dtype=np.uint32)}
    yield "match_prefix", {"token_ids": list(range(100_000, 130_000)), "lease_s": 0.0}, {}


def prompts(count: int, first: int) -> np.ndarray[Any, Any]:
    """Token ids of prompts of a page each."""
    return np.arange(first * PAGE, (first + count) * PAGE, dtype=np.uint32)


async def make(caller: Caller, passes: Passes, new: list[dict[str, str]]) -> None:
    for first in range(0, len(new), MAX_NEW):
        some = {"sequences": new[first : first + MAX_NEW]}
        await passes.measure(caller, "create_sequences", some)


async def empty_and_filled(caller: Caller, passes: Passes) -> None:
    await make(caller, passes, [{"id": name} for name in ids(MADE)])
    names = ids(MAX_SEQUENCES)
    for name, fields, tensors in (*many(names), *cascades(names), *alone()):
        await passes.measure(caller, name, fields, tensors)
    await passes.measure(caller, "delete_sequences", {"ids": ids(MAX_DELETED)})
    await passes.measure(caller, "delete_sequences", {"prefix": ""})


async def forks(caller: Caller, passes: Passes) -> None:
    await caller.create("trunk")
    count = 24 * PAGE + 3
    fields = {"sequences": ["trunk"], "append_indptr": [0, count]}
    for layer in range(2):
        await caller.call("append", {"layer": layer} | fields, **kv(count))
    await make(caller, passes, [{"id": name, "parent": "trunk"} for name in ids(MADE)])
    for name, fields, tensors in many(ids(MAX_SEQUENCES)):
        await passes.measure(caller, name, fields, tensors)
    lengths = {"sequences": ids(MAX_BATCH), "lengths": [5] * MAX_BATCH}
    await passes.measure(caller, "truncate_sequences", lengths)
    await passes.measure(caller, "delete_sequences", {"prefix": ""})


async def cached_prompts(caller: Caller, passes: Passes) -> None:
    """One-page nodes that the cache holds, and an append that evicts many of them."""
    for first in range(0, 16 * MAX_BATCH, MAX_BATCH):
        names = ids(first + MAX_BATCH)[first:]
        new = {"sequences": [{"id": name} for name in names]}
        await caller.submit(NewCall("create_sequences", new), room=ROOM_BYTES)
        sums = each(MAX_BATCH, PAGE)
        for layer in range(2):
            fields = {"layer": layer, "sequences": names, "append_indptr": sums}
            await caller.call("append", fields, **kv(MAX_BATCH * PAGE))
        tokens = {"token_ids": prompts(MAX_BATCH, first)}
        fields = {"sequences": names, "names_indptr": sums}
        await passes.measure(caller, "commit_sequences", fields, tokens)
    await passes.measure(caller, "delete_sequences", {"prefix": ""})
    await passes.measure(caller, "evict", {"num_pages": 512})
    await caller.create("large")
    for at_once in (2**18, 2**18, 2**18, 15_000 * PAGE):
        fields = {"layer": 0, "sequences": ["large"], "append_indptr": [0, at_once]}
        await passes.measure(caller, "append", fields, kv(at_once))
    await passes.measure(caller, "clear", {})
    await passes.measure(caller, "gather", {"layer": 0, "sequences": ["large"], "stop": 200_000})
    await passes.measure(caller, "page_table", {"sequences": ["large"]})
    await passes.measure(caller, "truncate", {"id": "large", "length": 7, "layer": 0})
    await passes.measure(caller, "delete_sequence", {"id": "large"})


async def chain(caller: Caller, passes: Passes) -> None:
    """Each sequence a fork of the one before, with a page more."""
    await caller.create("s0")
    for number in range(DEEP):
        for layer in range(2):
            fields = {"layer": layer, "sequences": [f"s{number}"], "append_indptr": [0, PAGE]}
            await caller.call("append", fields, **kv(PAGE))
        new = {"id": f"s{number + 1}", "parent": f"s{number}"}
        await caller.submit(creation(new))
    for name in ("pool", "snapshot"):
        await passes.measure(caller, name, {})
    names = ids(DEEP + 1)
    for some in (names[-100:], names[:450]):
        await passes.measure(caller, "page_table", {"sequences": some})
        fields, q = {"layer": 0, "sequences": some}, rows(len(some), 2)
        await caller.call("decode", fields, q=q)  # from which the engine learns what such rows take
        await passes.measure(caller, "decode", fields, {"q": q})
    await passes.measure(caller, "delete_sequences", {"ids": names[:MAX_DELETED]})
    await passes.measure(caller, "delete_sequences", {"prefix": ""})


Scenario = Callable[[Caller, Passes], Any]


def longest(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The longest pass of each operation of a scenario."""
    with measuring(monkeypatch) as passes:

        async def run(caller: Caller) -> dict[str, float]:
            await scenario(caller, passes)
            return passes.longest

        return with_engine(make_backend("cpu", GEOMETRY), run, arena_bytes=ARENA_BYTES)


@pytest.mark.parametrize(
    "scenario", [empty_and_filled, forks, cached_prompts, chain], ids=lambda one: one.__name__
)
def test_no_operation_keeps_the_loop_much_longer_than_a_slice(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = longest(scenario, monkeypatch)
    assert found and max(found.values()) < max_s(), found


def test_launches_that_many_calls_share_become_as_short_as_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RATES, "cpu", (4e10, 2e11))  # it is thought to be ten times as fast
    names, count = ids(64), 1000
    fields = {"layer": 0, "sequences": names}
    call = NewCall("decode", fields, {"q": rows(64, 8)})

    async def bursts(caller: Caller, passes: Passes) -> None:
        await caller.submit(creation(*({"id": name} for name in names)))
        for name in names:
            one = {"layer": 0, "sequences": [name], "append_indptr": [0, count]}
            await caller.call("append", one, **kv(count))
        for _ in range(2):  # the first measures such a launch
            del passes.seconds[:]
            await asyncio.gather(*(caller.submit(call) for _ in range(24)))
        passes.longest["decode"] = max(passes.seconds)

    found = longest(bursts, monkeypatch)
    assert found["decode"] < max_s(), found


def test_a_turn_that_is_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, bound = table.HANDLERS["pool"], max_s()

    def slow(*given: Any) -> Any:
        ends = time.thread_time() + bound + 0.05
        while time.thread_time() < ends:
            pass
        return handler.begin(*given)

    async def asks(caller: Caller, passes: Passes) -> None:
        await passes.measure(caller, "pool", {})
        await passes.measure(caller, "list_sequences", {"limit": 10})

    monkeypatch.setitem(table.HANDLERS, "pool", table.Handler(slow))
    found = longest(asks, monkeypatch)
    assert found["pool"] > bound > found["list_sequences"], found
