"""An engine in a thread behind its socket, a caller on the road to it, and calls to send."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import socket
import tempfile
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from attnd.wire.images import RESPONSE

from config.sections import CacheSettings
from config.settings import AuthSettings, EngineSettings, ServerSettings, Settings
from kernels.backend import PoolGeometry
from service.engine.loop.engine import Engine
from service.image.json_body import fields_text, read_header
from service.image.reading import Layout, place, read_entry
from service.keys import line_of
from service.metrics import Metrics
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered, RoadCaller
from service.road.engine_end.listening import listen
from tests.engine.fake_backend import GEOMETRY, WAIT_S, FakeBackend
from tests.images import read_image, write_image

T = TypeVar("T")
OPTIONS = {"slice_ms"}
MADE_OF = {"late", "geometry"}
ARENA_BYTES = 2**24
ROOM_BYTES = 2**17
"""Of an answer, beside as much as the request takes."""


@dataclass(frozen=True)
class NewCall:
    """An operation with its fields and tensors, not sent yet."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def but(self, name: str | None = None, **fields: Any) -> NewCall:
        """The same with other fields; arrays replace tensors, None takes one away."""
        tensors = dict(self.tensors)
        for key in [key for key in fields if key in tensors or isinstance(fields[key], np.ndarray)]:
            tensors[key] = fields.pop(key)
        tensors = {key: value for key, value in tensors.items() if value is not None}
        return NewCall(name or self.name, self.fields | fields, tensors)


@dataclass(frozen=True)
class Reply:
    """An answer, copied out of the arena."""

    status: int
    fields: dict[str, Any]
    tensors: dict[str, Any]
    stages: tuple[float, ...]

    @property
    def o(self) -> Any:
        return self.tensors["o"]

    @property
    def lse(self) -> Any:
        return self.tensors["lse"]


def read_reply(answer: Answered) -> Reply:
    """An answer of any size: the service's own images are not held to the limits of requests."""
    whole = bytes(answer.image)
    document, start = read_header(whole)
    room = len(whole) - start
    names = [name for name in document if name != "__metadata__"]
    layout = Layout({}, tuple(read_entry(name, document[name], room)[0] for name in names))
    fields = json.loads(fields_text(document, RESPONSE))
    return Reply(answer.status, fields, place(whole, start, layout), answer.stages)


class Refused(Exception):
    """A problem for an answer."""

    def __init__(self, status: int, problem: dict[str, Any], needed: int) -> None:
        super().__init__(problem["detail"])
        self.status = status
        self.code: str = problem["code"]
        self.problem = problem
        self.needed = needed


class Caller:
    """One session with an engine that runs in this process."""

    def __init__(self, running: Running, road: RoadCaller) -> None:
        self.running = running
        self.road = road

    @property
    def engine(self) -> Engine:
        return self.running.engine

    @property
    def state(self) -> str:
        return self.engine.state.state

    @property
    def num_waiting(self) -> int:
        """Operations whose turn has not come."""
        return self.engine.scheduler.queue.count

    async def submit(
        self, call: NewCall, *, deadline_s: float = 0.0, room: int | None = None
    ) -> Reply:
        """The answer of an operation, for which there are `room` bytes. Raises `Refused`."""
        image = write_image(call.fields, call.tensors)
        request = self.road.take(len(image))
        answer = self.road.take(len(image) + ROOM_BYTES if room is None else room)
        request.view(len(image))[:] = image
        number, deadline_us = BY_NAME[call.name].number, int(deadline_s * 1e6)
        try:
            reply = await self.road.call(
                number, request, len(image), answer, deadline_us=deadline_us
            )
            if reply.status >= 400:
                problem = read_image(bytes(reply.image), "problem").fields
                raise Refused(reply.status, problem, reply.needed)
            return read_reply(reply)
        finally:
            request.free()
            answer.free()

    async def call(self, name: str, fields: dict[str, Any] | None = None, **tensors: Any) -> Reply:
        return await self.submit(NewCall(name, fields or {}, tensors))

    def start(self, call: NewCall, **how: Any) -> asyncio.Task[Reply]:
        """The same as a task whose frame is sent at the next turn of the loop."""
        return asyncio.create_task(self.submit(call, **how))

    def attempt(self, call: NewCall, **how: Any) -> asyncio.Task[Reply | Exception]:
        """The same as a task that has an error for its result."""
        return asyncio.create_task(outcome(self.submit(call, **how)))

    async def code(self, call: NewCall, **how: Any) -> str:
        """`ok`, or the code of the error that answers an operation."""
        return code(await outcome(self.submit(call, **how)))

    async def refused(
        self, call: NewCall, code: str = "", *, room: int | None = None, **problem: Any
    ) -> Refused:
        """The error that answers an operation, with this code and these parts of its problem."""
        with pytest.raises(Refused) as caught:
            await self.submit(call, room=room)
        error = caught.value
        found = {name: error.problem.get(name) for name in problem}
        assert (code or error.code, found) == (error.code, problem), (call, error.problem)
        assert error.status == error.problem["status"]
        return error

    async def create(self, *names: str, parent: str | None = None) -> None:
        await self.submit(
            creation(*({"id": name} | ({"parent": parent} if parent else {}) for name in names))
        )

    async def fill(self, **tokens: int) -> None:
        """New sequences with as many tokens at every layer."""
        await self.create(*tokens)
        for layer in range(self.engine.info.num_layers):
            for seed, (name, count) in enumerate(tokens.items()):
                await self.submit(append(name, count, layer, 7 * seed))

    async def pool(self) -> dict[str, Any]:
        return (await self.call("pool")).fields

    async def view(self, name: str) -> dict[str, Any]:
        return (await self.submit(get(name))).fields

    async def length(self, name: str, layer: int = 0) -> int:
        tokens: int = (await self.view(name))["lengths"][layer]
        return tokens

    @asynccontextmanager
    async def another(self, key: str = "") -> AsyncIterator[Caller]:
        """Another session with the same engine."""
        road = await RoadCaller.connect(self.running.path, ARENA_BYTES, key=key)
        try:
            yield Caller(self.running, road)
        finally:
            road.close()

    def metric(self, line: str) -> float:
        """The value of the metric whose line begins so."""
        text = self.running.metrics.render()[0].decode()
        found = [float(one.split()[-1]) for one in text.splitlines() if one.startswith(line)]
        assert len(found) == 1, f"{line} is there {len(found)} times"
        return found[0]


@dataclass
class Running:
    """An engine and its thread; `error` is what ended it."""

    engine: Engine
    path: str
    metrics: Metrics
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, name="engine")
        self.thread.start()

    def run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        if self.thread.is_alive():
            self.engine.drain()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the engine does not end"


Keys = Mapping[str, tuple[str, list[str]]]
"""The namespace and the scopes of each key."""


def with_engine(
    backend: Any,
    scenario: Callable[[Caller], Coroutine[Any, Any, T]],
    *,
    ends: type[BaseException] | None = None,
    arena_bytes: int = ARENA_BYTES,
    keys: Keys | None = None,
    key: str = "",
    cache: CacheSettings | None = None,
    **settings: Any,
) -> T:
    """Run a scenario with a caller of a ready engine, and drain it; it is to end with `ends`.

    `settings` are the engine's and the server's. All that a test sends has its turn in one round,
    unless `slice_ms` is short. The caller shows `key`, where there are `keys`.
    """

    async def run(running: Running) -> T:
        road = await RoadCaller.connect(running.path, arena_bytes, key=key)
        try:
            async with asyncio.timeout(6 * WAIT_S):
                return await scenario(Caller(running, road))
        finally:
            if isinstance(backend, FakeBackend):
                backend.let_all()
            road.close()

    given = {"slice_ms": 1000.0} | settings
    engine = {name: given.pop(name) for name in given.keys() & EngineSettings.model_fields}
    with tempfile.TemporaryDirectory(prefix="attnd-keys-") as directory:
        file = None
        if keys is not None:
            file = str(Path(directory) / "keys")
            write_keys(file, keys)
        every = Settings(
            server=ServerSettings(**given),
            engine=EngineSettings(**engine),
            auth=AuthSettings(keys_file=file),
            cache=cache or CacheSettings(),
        )
        with running_engine(backend, every, ends) as running:
            return asyncio.run(run(running))


def write_keys(file: str, keys: Keys) -> None:
    Path(file).write_text("\n".join(line_of(key, *held) for key, held in keys.items()))


Test = Callable[..., Coroutine[Any, Any, None]]


def engine_test(make: Callable[..., Any], **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Make a test of a coroutine whose first parameter is a caller of an engine over `make(...)`.

    `options` go to `with_engine`, those in `MADE_OF` to `make`; so do parameters and fixtures of
    the test that are named there or in `OPTIONS`. A parameter `backend` is the engine's; one that
    is named as one of the `keys` is a session by that key.
    """

    def decorate(coroutine: Test) -> Callable[..., None]:
        signature = inspect.signature(coroutine)
        _, *names = signature.parameters
        sessions = [name for name in names if name in options.get("keys", ())]

        def test(**given: Any) -> None:
            every = options | {name: given[name] for name in (OPTIONS | MADE_OF) & given.keys()}
            backend = make(**{name: every.pop(name) for name in MADE_OF & every.keys()})
            given |= {"backend": backend} if "backend" in names else {}

            async def scenario(caller: Caller) -> None:
                async with AsyncExitStack() as stack:
                    for name in sessions:
                        given[name] = await stack.enter_async_context(caller.another(name))
                    await coroutine(caller, **given)

            with_engine(backend, scenario, **every)

        functools.update_wrapper(test, coroutine)
        taken = [signature.parameters[name] for name in names if name not in ("backend", *sessions)]
        test.__signature__ = signature.replace(parameters=taken)
        return test

    return decorate


def fake_engine(**options: Any) -> Callable[[Test], Callable[..., None]]:
    """A test of an engine over a `FakeBackend`, which may be `late`."""
    return engine_test(lambda late=False: FakeBackend(late=late), **options)


@contextmanager
def running_engine(
    backend: Any,
    settings: Settings,
    ends: type[BaseException] | None = None,
    secret: str = "",
    remote: socket.socket | None = None,
    metrics: Metrics | None = None,
) -> Iterator[Running]:
    """An engine in a thread, drained at the end; it must end with `ends`. `secret` and `remote`
    are for its doors: doors on other hosts connect to `remote`."""
    with tempfile.TemporaryDirectory(prefix="attnd-test-") as directory:
        listening = listen(Path(directory) / "engine.sock", private=True)
        metrics = metrics or Metrics()
        try:
            engine = Engine(listening.sock, settings, backend, metrics, secret, remote)
        except BaseException:
            listening.close()
            raise
        running = Running(engine, str(listening.path), metrics)
        try:
            yield running
        finally:
            running.stop()
            listening.close()
            backend.close()
    if running.error is not None and (ends is None or not isinstance(running.error, ends)):
        raise running.error
    assert ends is None or running.error is not None, "the engine ended well"


async def until(met: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    async with asyncio.timeout(WAIT_S):
        while not met():
            await asyncio.sleep(0.001)


async def outcome(awaitable: Awaitable[T]) -> T | Exception:
    """The result, or the exception, as a value."""
    try:
        return await awaitable
    except Exception as error:
        return error


def code(result: Any) -> str:
    """`ok`, or the error's code."""
    if isinstance(result, Reply):
        return "ok"
    assert isinstance(result, Refused), result
    return result.code


def rows(seed: int, n: int, geometry: PoolGeometry = GEOMETRY, dtype: Any = np.float32) -> Any:
    """k or v [n, Hkv, D]."""
    shape = (n, geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def queries(seed: int, n: int, geometry: PoolGeometry = GEOMETRY, dtype: Any = np.float32) -> Any:
    """q [n, 2 * Hkv, D]."""
    shape = (n, 2 * geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng(1000 + seed).standard_normal(shape).astype(dtype)


def append(name: str, n: int, layer: int = 0, seed: int = 0, **fields: Any) -> NewCall:
    fields = {"layer": layer, "sequences": [name], "append_indptr": [0, n]} | fields
    return NewCall("append", fields, {"k": rows(seed, n), "v": rows(seed + 1, n)})


def decode(*names: str, layer: int = 0, seed: int = 0, new: bool = False, **fields: Any) -> NewCall:
    """A decode of fp32 rows; with `new`, of k and v appended first."""
    count = len(names)
    tensors = {"q": queries(seed, count)}
    if new:
        tensors |= {"k": rows(seed + 2, count), "v": rows(seed + 3, count)}
    return NewCall("decode", {"layer": layer, "sequences": list(names)}, tensors).but(**fields)


def creation(*new: dict[str, Any]) -> NewCall:
    return NewCall("create_sequences", {"sequences": list(new)})


def get(name: str) -> NewCall:
    return NewCall("get_sequence", {"id": name})


def gather(*names: str, layer: int = 0, dtype: str = "fp32") -> NewCall:
    return NewCall("gather", {"layer": layer, "sequences": list(names), "dtype": dtype})


def delete(name: str) -> NewCall:
    return NewCall("delete_sequence", {"id": name})


def truncate(name: str, length: int) -> NewCall:
    return NewCall("truncate", {"id": name, "length": length})


async def three_sequences(caller: Caller) -> None:
    """`a` of 5 tokens and `b` of 9, both at layer 0, and `held`, which is empty."""
    await caller.create("a", "b", "held")
    await caller.submit(append("a", 5))
    await caller.submit(append("b", 9, seed=5))


@contextmanager
def unsliced(caller: Caller) -> Iterator[None]:
    """The engine cuts no work into slices within the block, which makes a beginning fast."""
    pace = caller.engine.store.pace
    slice_s, pace.slice_s = pace.slice_s, 1.0
    try:
        yield
    finally:
        pace.slice_s = slice_s


@contextmanager
def no_turns(caller: Caller) -> Iterator[None]:
    """The engine receives calls, and gives turns to none of them before the end of the block."""
    scheduler = caller.engine.scheduler
    setattr(scheduler, "take_turns", lambda: None)  # noqa: B010
    try:
        yield
    finally:
        delattr(scheduler, "take_turns")


async def held_back(caller: Caller, backend: FakeBackend, *every: NewCall) -> list[Any]:
    """The outcomes of operations that the engine has all received before the first has its turn.

    Results of a `late` backend come after the first turn.
    """
    if backend.late:
        backend.gate.clear()
    with no_turns(caller):
        tasks = [caller.attempt(call) for call in every]
        await until(lambda: caller.num_waiting == len(every))
        del backend.launches[:], backend.calls[:]
    await until(lambda: caller.num_waiting < len(every) or tasks[0].done())
    backend.gate.set()
    return await asyncio.gather(*tasks)
