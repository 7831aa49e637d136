"""The scheduler of examples/serve over a running attnd, in this process: what may go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attnd import ConnectionFailed, ReplyLost
from attnd.torch import TorchSession
from attnd.transformers import pool_settings

from bench.driver.servers import free_port
from examples.local_service import serve_tcp
from examples.serve import scheduler as module
from examples.serve.answers import Delta, Sampling
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler
from tests.examples.tiny_decoders import Asked, NoText, ask, greedy, llama
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

PAGE_SIZE, POOL_TOKENS, COUNT = 16, 640, 48
SHARED = list(range(1, 129))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    settings = pool_settings(llama(5)) | {
        "pool.page-size": PAGE_SIZE,
        "pool.num-pages": POOL_TOKENS // PAGE_SIZE,
        "server.port": free_port(),
    }
    with serve_tcp(settings):
        yield int(settings["server.port"])


class Faulty(Runner):
    """Raises what `faults` has for a method, once each; each step takes `pause_s` longer."""

    def __init__(self, model: Any, port: int) -> None:
        self.faults: dict[str, list[Exception]] = {}
        self.pause_s = 0.0
        super().__init__(model, lambda: TorchSession(port=port), 8, 520)

    def _fault(self, name: str) -> None:
        if faults := self.faults.get(name):
            raise faults.pop(0)

    def forward(self, rows: Any) -> torch.Tensor:
        self._fault("forward")
        time.sleep(self.pause_s)
        return super().forward(rows)

    def delete(self, sequences: Any) -> None:
        self._fault("delete")
        super().delete(sequences)

    def reconnect(self) -> None:
        self._fault("reconnect")
        super().reconnect()


@dataclass
class Bench:
    runner: Faulty
    scheduler: Scheduler

    def ask(self, prompt: list[int], **options: Any) -> Asked:
        return ask(self.scheduler, prompt, **{"max_tokens": COUNT, **options})


@pytest.fixture
def bench(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A scheduler that is not started yet: requests before `start` arrive in one round."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    with TorchSession(port=port) as session:
        session.clear()
    runner = Faulty(llama(5), port)
    scheduler = Scheduler(runner, NoText(), set())
    yield Bench(runner, scheduler)
    if scheduler._thread.is_alive():
        scheduler.close()


@pytest.fixture(scope="module")
def expect() -> Callable[..., list[int]]:
    model = llama(5)
    return lambda prompt, count=COUNT: greedy(model, prompt, count)


def prompts(count: int) -> list[list[int]]:
    return [[number + 1, *range(1, 40 + number)] for number in range(count)]


def test_prompts_that_begin_alike_wait_for_the_first_ones_pages(bench: Bench, expect: Any) -> None:
    asked = [bench.ask([*SHARED, number, 7]) for number in range(200, 204)]
    bench.scheduler.start()
    for number, one in enumerate(asked):
        assert one.tokens() == expect([*SHARED, 200 + number, 7])
    assert [one.request.cached_tokens for one in asked] == [0, *[len(SHARED)] * 3]


@pytest.mark.parametrize(
    "fault", [ReplyLost("the connection broke"), RuntimeError("a bug")], ids=type
)
def test_a_round_that_fails_is_computed_again(bench: Bench, expect: Any, fault: Exception) -> None:
    asked = [bench.ask(prompt) for prompt in prompts(4)]
    bench.runner.faults["forward"] = [fault]
    bench.scheduler.start()
    assert [one.tokens() for one in asked] == [expect(prompt) for prompt in prompts(4)]


def test_attnd_may_fail_to_start_and_the_scheduler_tries_again(bench: Bench, expect: Any) -> None:
    asked = bench.ask(SHARED)
    failed = RuntimeError("the service failed to start: exit status 1")
    bench.runner.faults |= {"forward": [ReplyLost("lost")], "reconnect": [failed, failed]}
    bench.scheduler.start()
    assert asked.tokens() == expect(SHARED)


@pytest.mark.parametrize("work", ["forward", "sample"])
def test_work_that_always_fails_ends_with_an_error_and_later_work_does_not(
    bench: Bench, expect: Any, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    asked = bench.ask(SHARED)
    faults, sample = [RuntimeError("a bug")] * 2, module.sample

    def fails_twice(*given: Any) -> Any:
        if faults:
            raise faults.pop()
        return sample(*given)

    if work == "forward":
        bench.runner.faults["forward"] = faults
    else:
        monkeypatch.setattr(module, "sample", fails_twice)
    bench.scheduler.start()
    assert asked.over.wait(60)
    assert "a bug" in (asked.error or "")
    assert bench.ask(SHARED).tokens() == expect(SHARED)


def test_a_temperature_near_zero_is_greedy_and_harms_no_neighbour(
    bench: Bench, expect: Any
) -> None:
    bench.scheduler.start()
    asked = bench.ask(SHARED, temperature=1e-40)
    beside = bench.ask(SHARED[:40])
    assert asked.tokens() == expect(SHARED)
    assert beside.tokens() == expect(SHARED[:40])


def test_a_cancelled_request_frees_its_pages_after_the_round(bench: Bench, port: int) -> None:
    bench.scheduler.start()
    asked = bench.ask(SHARED, max_tokens=400)
    with TorchSession(port=port) as session:
        wait_for(lambda: len(list(session.list_sequences())) == 1, "the answer to run")
        bench.scheduler.cancel(asked.request)
        wait_for(lambda: not list(session.list_sequences()), "its sequence to be deleted", 5)
    assert not asked.over.is_set()


def test_more_answers_than_rows_run_one_after_another(bench: Bench, expect: Any) -> None:
    over, counts = threading.Semaphore(0), list[int]()
    forward = bench.runner.forward
    bench.runner.forward = lambda rows: counts.append(len(rows)) or forward(rows)  # type: ignore

    def emit(delta: Delta) -> None:
        assert delta.error is None
        if delta.finish:
            over.release()

    sampling = Sampling(12, temperature=0)
    request = bench.scheduler.submit(SHARED[:40], sampling, 12, emit)
    bench.scheduler.start()
    assert all(over.acquire(timeout=60) for _ in range(12))
    for answer in request.answers:
        assert answer.tokens[40:] == expect(SHARED[:40], 12)
    assert max(counts) == bench.runner.max_rows


def test_models_that_share_an_attnd_do_not_share_its_cache(bench: Bench, port: int) -> None:
    bench.scheduler.start()
    first = bench.ask(SHARED)
    first.tokens()
    other = llama(6)
    expected = greedy(other, SHARED, COUNT)
    runner = Runner(other, lambda: TorchSession(port=port), 8, 520)
    scheduler = Scheduler(runner, NoText(), set())
    scheduler.start()
    asked = Bench(bench.runner, scheduler).ask(SHARED)
    assert asked.tokens() == expected != first.tokens()
    assert asked.request.cached_tokens == 0
    scheduler.close()


def test_the_scheduler_ends_while_attnd_is_away(bench: Bench) -> None:
    away = threading.Event()

    def refused() -> TorchSession:
        away.set()
        raise ConnectionFailed("no engine")

    bench.runner._connect = refused
    bench.runner.faults["forward"] = [ReplyLost("lost")]
    asked = bench.ask(SHARED)
    bench.scheduler.start()
    assert away.wait(60)
    bench.scheduler.close()  # an exception of its thread would fail this test
    assert asked.over.is_set() and asked.error == "the server is stopping"
