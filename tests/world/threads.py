"""The world of threads: several of one process call an engine by one session of the client.

Each runs in a thread of the system, of which only one goes on at a time: at a lock, where it waits,
or behind any line of the session's code the seed chooses the next. So a seed repeats a race.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from attnd import Session
from attnd.calls.call import Call
from attnd.errors import AttndError, ConnectionFailed, ProtocolError, ServiceError, TimedOut
from attnd.road import areas, arena, connection, greeting
from attnd.road.connection import Connection
from attnd.wire import frames as f

from tests.world.doors import RAW
from tests.world.network import NEVER, READ, WRITE, Replaced, SimSocket
from tests.world.oracle.calls import Answer, Op, call, check
from tests.world.programs import Program, Step, Steps
from tests.world.simulation import LONGEST_S, Over, Plan
from tests.world.world import World, parse

CLIENT: Final = Path(connection.__file__).parents[1]
TRACED: Final = {str(path) for path in (*CLIENT.glob("road/*.py"), CLIENT / "session.py")}
SWITCHES: Final = (0.0, 0.01, 0.1)  # shares of lines behind which another thread goes on
UNREAD_S: Final = 0.2  # after which a thread reads what has arrived, at the latest
LONGEST: Final = (30.0,)
TIMEOUTS_S: Final = (0.02, 0.3, *LONGEST, *LONGEST)
SLOW: Final = {"engine stalls", "caller stops reading", "engine dies", "connection breaks"}
"""Faults that explain why no answer came in 30 s."""


@dataclass(slots=True, eq=False)
class Thread:
    """One of them: what it waits for, and until when at most."""

    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready_at: Callable[[], float] = float
    ends: float = NEVER
    at: str = ""  # where it waits: a lock, a socket, or neither
    op: Op | None = None
    is_over: bool = False


class Threads:
    """Lets one thread at a time go on, by the seed."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world, self.order = world, random.Random(f"{world.plan.seed} threads")
        self.share = self.order.choice(SWITCHES)
        self.main = threading.Semaphore(0)
        self.living: list[Thread] = []
        self.idle = self.current = Thread()  # the first: none of them, but the engine

    def start(self, program: Callable[[], None]) -> None:
        thread = Thread()
        self.living.append(thread)
        threading.Thread(target=self._run, args=(thread, program), daemon=True).start()

    def _run(self, thread: Thread, program: Callable[[], None]) -> None:
        thread.baton.acquire()
        sys.settrace(self._trace)
        try:
            program()
        except Exception as error:
            self.world.fail(error)
        except SystemExit:
            pass
        finally:
            sys.settrace(None)
            thread.is_over = True
            self.main.release()

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and self.order.random() < self.share and not self.world.is_over:
            self.wait("", float)
        return self._trace

    def wait(self, at: str, ready_at: Callable[[], float], ends: float = NEVER) -> bool:
        """The thread goes on when it is ready (True), or at a time."""
        thread, clock = self.current, self.world.clock
        if self.world.is_over:
            raise SystemExit
        thread.at, thread.ready_at, thread.ends = at, ready_at, ends
        self._switch(thread)
        if self.world.is_over:
            raise SystemExit
        return ready_at() <= clock.now

    def _switch(self, thread: Thread) -> None:
        self.main.release()
        thread.baton.acquire()

    def sleep(self, seconds: float) -> None:
        ends = self.world.clock.now + seconds
        if self.current is self.idle:
            self.world.clock.advance(ends)
        else:
            self.wait("", lambda: NEVER, ends)

    def run(self) -> None:
        """Until all threads have ended."""
        world, clock = self.world, self.world.clock
        while self.living:
            if world.is_over or clock.now > LONGEST_S:
                break
            world.look()
            dues = {one: min(one.ends, one.ready_at()) for one in self.living}
            ready: list[Thread | None] = [one for one, due in dues.items() if due <= clock.now]
            engine_due = world.engine.next_due()
            if engine_due <= clock.now and (not ready or self.order.random() < 0.5):
                world.engine.round()
            elif ready:
                self._go_on(self.order.choice(ready))
            else:
                self._check_reading()
                clock.advance(min(engine_due, *dues.values()))
        for thread in [one for one in self.living if not one.is_over]:  # the run has failed
            check(world.is_over, "the run does not end")
            self._go_on(thread)

    def _go_on(self, thread: Any) -> None:
        self.current = thread
        thread.baton.release()
        self.main.acquire()
        self.current = self.idle
        if thread.is_over:
            self.living.remove(thread)

    def _check_reading(self) -> None:
        """Where threads wait for one another, one of them reads."""
        places, road = {one.at for one in self.living}, self.world.session._road.connection
        if "lock" in places and "socket" not in places and road is not None and not road.broken:
            late = self.world.clock.now - end_of(road).ready_at(READ)
            check(late < UNREAD_S, "threads wait, and none reads what has arrived")


class SimLock:
    """A lock between these threads."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.is_taken = threads, False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        ends = NEVER if timeout < 0 else self.threads.world.clock.now + timeout
        while self.is_taken and blocking:
            if not self.threads.wait("lock", lambda: NEVER if self.is_taken else 0.0, ends):
                return False
        is_mine, self.is_taken = not self.is_taken, True
        return is_mine

    def release(self) -> None:
        if not self.is_taken:
            raise RuntimeError("release unlocked lock")
        self.is_taken = False

    def locked(self) -> bool:
        return self.is_taken

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Line:
    """The client's end of a connection, which blocks its thread at first."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world, self.timeout_s = world, NEVER
        self.end: SimSocket | None = None

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    def settimeout(self, seconds: float) -> None:
        self.timeout_s = seconds

    def connect(self, _: str) -> None:
        self.end = self.world.engine.listener.dial()

    def close(self) -> None:
        if self.end is not None:
            self.end.close()

    def wait(self, event: int, timeout_s: float) -> bool:
        def ready_at() -> float:
            return 0.0 if end_of(self).is_closed else end_of(self).ready_at(event)

        if timeout_s <= 0:
            return ready_at() <= self.world.clock.now
        ends = self.world.clock.now + timeout_s
        return self.world.threads.wait("socket", ready_at, ends)

    def sendall(self, data: bytes) -> None:
        while data:
            if not self.wait(WRITE, self.timeout_s):
                raise TimeoutError("the engine does not read")
            data = data[end_of(self).send(data) :]

    def recvmsg(self, size: int, *_: Any) -> Any:
        if not self.wait(READ, self.timeout_s):
            raise TimeoutError("nothing comes")
        return end_of(self).recvmsg(size)


def end_of(owner: Any) -> SimSocket:
    """The client's end of a line, or of a session's connection."""
    found = owner.end if isinstance(owner, Line) else owner._socket.end
    assert isinstance(found, SimSocket)
    return found


class SimPoll:
    """`select.poll` for one line."""

    def register(self, line: Line, event: int) -> None:
        self.line, self.event = line, event

    def poll(self, timeout_ms: float) -> bool:
        return self.line.wait(self.event, timeout_ms / 1e3)


class CallerThread(Program):
    """Runs statements in a thread, by the session that it shares."""

    def __init__(self, world: ThreadWorld, number: int) -> None:
        super().__init__(world, number)
        self.space = world.spaces[0]
        self.weights["step"] = self.weights["named"] = 0  # its steps have lanes of their own
        self.is_hasty = True
        self.kept: list[tuple[Any, Any]] = []  # results, and copies of them

    def go(self) -> None:
        for number in range(self.world.plan.statements):
            if (name := self.chosen(number)) is not None:
                self.world.note(f"caller {self.number}: {name}")
                self.perform(self.made(name))

    def perform(self, step: Step | Steps) -> Answer | None:
        """`take`, in a thread."""
        answer = None
        if isinstance(step, Op):
            answer = self.call(step)
        elif isinstance(step, list):
            for op in step:
                self.call(op)
        elif isinstance(step, float):
            self.world.threads.sleep(step)
        else:
            with suppress(StopIteration):
                while True:
                    answer = self.perform(step.send(answer))
        return answer

    def call(self, op: Op) -> Answer | None:
        world, timeout_s = self.world, self.order.choice(TIMEOUTS_S if self.is_hasty else LONGEST)
        op.space, world.threads.current.op = self.space, op
        op.faults = len(world.faults)
        session = world.sessions[timeout_s]
        try:
            tensors = op.tensors
            if self.order.random() < 0.3:  # made in the arena, and sent in place
                tensors = {name: session.empty(name, one.shape) for name, one in tensors.items()}
                for name, one in op.tensors.items():
                    tensors[name][...] = one
            sent = Call(op.name, RAW, False, op.fields, tensors, answer_bytes=2**13)
            fields, found = session.send(sent)
        except ProtocolError:
            raise
        except AttndError as error:
            if isinstance(error, ServiceError) and op.reply is not None:
                right = (parse(*op.reply)[0], "unauthorized")  # its key was revoked meanwhile
                check(error.code in right, "another error", error, op.reply)
            is_slow = not SLOW.isdisjoint(world.faults[op.faults :])
            is_late = isinstance(error, TimedOut) and timeout_s == max(TIMEOUTS_S)
            check(is_slow or not is_late, f"{op.name}: no answer, or no place for it")
            if isinstance(error, ConnectionFailed):
                world.threads.sleep(0.05)
            return None
        check(op.answer, f"{op.name} has an answer before the engine's")
        assert op.answer is not None
        self.kept = [*self.kept[-3:], *((one, one.copy()) for one in found.values())]
        is_same = fields == op.answer[0] and found.keys() == op.answer[1].keys()
        for name, one in found.items():
            is_same = is_same and np.array_equal(one, op.answer[1][name], equal_nan=True)
        check(is_same, f"the answer to {op.name} changed on its way")
        for one, copy in self.kept:
            check(np.array_equal(one, copy, equal_nan=True), "a result that is held has changed")
        return op.answer

    def end(self) -> None:
        """All rows are right, and all is given back."""
        self.is_hasty = False
        self.world.threads.sleep(6.0)  # until what is loaded ahead is there
        for name in list(self.space.held):
            for layer in range(self.rows.geometry.num_layers):
                self.call(call("gather", layer=layer, sequences=[name], dtype="fp32"))
        self.call(call("delete_sequences", prefix=""))
        for key in list(self.space.pins):
            self.call(call("unpin", page_key=key))
        self.call(call("evict", num_pages=self.rows.geometry.num_pages))
        self.world.threads.sleep(8.0)
        self.world.session.close()
        self.world.threads.sleep(2.0)


class ThreadWorld(World):
    """One run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.threads = Threads(self)
        self.restored_at = NEVER

    def patches(self) -> list[Replaced]:
        send, cancel = Connection._send, Connection.cancel

        def sent(road: Any, frame: bytes, ends: float) -> None:
            if f.HEADER.unpack_from(frame)[0] == f.CALL and not road.broken:
                (number,) = f.CALL_ID.unpack_from(frame, f.HEADER_BYTES)
                self.posted(end_of(road).pair, number)
            send(road, frame, ends)

        def cancelled(road: Any, number: int) -> None:
            if (op := self.calls.get((end_of(road).pair, number))) is not None:
                op.is_cancelled = True
            cancel(road, number)

        locks: Any = SimpleNamespace(Lock=lambda: SimLock(self.threads))
        locks.allocate_lock = locks.Lock
        sockets = SimpleNamespace(**vars(socket) | {"socket": lambda *_: Line(self)})
        polls = SimpleNamespace(POLLIN=READ, POLLOUT=WRITE, poll=SimPoll)
        return [
            *super().patches(),
            *((module, "threading", locks) for module in (connection, areas, arena)),
            *((connection, "_thread", locks), (connection, "select", polls)),
            *((greeting, "socket", sockets), (time, "sleep", self.threads.sleep)),
            *((Connection, "_send", sent), (Connection, "cancel", cancelled)),
        ]

    def posted(self, pair: int, number: int) -> None:
        """A call goes to the engine now."""
        op = self.threads.current.op
        assert op is not None
        op.session, op.number, op.sent = pair, number, self.clock.now
        self.calls[pair, number] = op
        self.model.outstanding.add(op)
        self.result.calls += 1

    def revoke(self, name: str) -> None:
        super().revoke(name)
        self.restored_at = self.clock.now + self.order.choice((0.05, 0.5, 3.0))

    def look(self) -> None:
        """Processes that start again, and keys that come back."""
        if self.engine.is_over:
            self.begin()
        if self.clock.now >= self.restored_at:
            self.restored_at = NEVER
            self.restore_keys()

    async def main(self) -> None:
        options: Any = {"api_key": self.spaces[0].name, "arena_bytes": 2**16, "retries": 0}
        self.sessions = {one: Session("world", timeout=one, **options) for one in TIMEOUTS_S}
        self.session = self.sessions[max(TIMEOUTS_S)]
        self.session._road.lock = SimLock(self.threads)  # type: ignore[assignment]
        for other in self.sessions.values():
            other._road = self.session._road
        callers = [CallerThread(self, number) for number in range(self.plan.callers)]
        for caller in callers:
            self.threads.start(caller.go)
        self.threads.run()
        self.end_faults()
        self.restore_keys()
        self.threads.start(callers[0].end)
        self.threads.run()
        if self.is_over:
            raise Over
        self.engine.check_empty()
        check(not self.engine.engine.callers.sessions, "sessions are left")
