"""The engine's connections: sessions are accepted, read, answered and closed."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from attnd.wire.frames import NO_STAGES

from config.settings import ServerSettings
from kernels.backend import Backend
from kernels.lanes.lane import address_of
from service.errors import NotReady, Overloaded, Unauthorized
from service.operations.schema.fields import InfoAnswer
from service.operations.table import BY_NAME
from service.road.arena import Pinning
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, Event, SessionConfig
from service.road.engine_end.listening import (
    Listener,
    SpareDescriptor,
    accept,
    may_connect,
    turn_away,
)
from service.road.engine_end.session import Session, Stages
from service.road.messages import State
from service.road.tcp import tune

LOG: Final = logging.getLogger("attnd.engine")
GREETING_S: Final = 10.0
"""Longest time from a connection to its HELLO."""
LEAST_UNGREETED: Final = 16
"""Minimum number of connections without HELLO that are kept open."""
RECEIVE_S: Final = 0.005
"""Longest time in a round for reading frames."""
SLOW_S: Final = 0.001
"""A session that took longer in a round is read after the others in the next."""


class Callers:
    """The sessions of one engine, on its selector; sessions are the data of their sockets."""

    def __init__(
        self,
        listener: Listener,
        selector: selectors.BaseSelector,
        server: ServerSettings,
        backend: Backend,
        info: InfoAnswer,
        admission: Admission,
        unpin: Callable[[memoryview], object],
        remote: Listener | None = None,
        share: float = 1.0,
    ) -> None:
        """Doors on other hosts connect to `remote` over TCP. `share`: the part of
        server.max_sessions that one namespace may have."""
        self._namespace_limit = max(1, int(server.max_sessions * share))
        self._listeners = [listener] if remote is None else [listener, remote]
        self._selector = selector
        self._server = server
        self._backend = backend
        self._state = State("ready", "ready")
        self._uids = frozenset(server.socket_uids)
        self.sessions: set[Session] = set()
        self.ungreeted: dict[Session, str] = {}
        """Connections without HELLO, oldest first, with their hosts' addresses. They do not count
        towards server.max_sessions, so they cannot take the place of sessions."""
        self.ended: list[Session] = []
        """Sessions to be closed."""
        self._number = 0
        self._spare = SpareDescriptor()
        self._passed_over: set[int] = set()
        """Descriptors that were ready in the latest round, and for which no time was left."""
        self._slow: set[int] = set()
        """Descriptors whose reading took more than `SLOW_S` in the latest round."""
        self._config = SessionConfig(
            instance_id=info.instance_id,
            routes={name: operation.number for name, operation in BY_NAME.items()},
            limits=info.limits.model_dump(),
            max_arena_bytes=server.max_arena_bytes,
            default_deadline_s=server.deadline_s,
            pinning=Pinning(self._pin, unpin),
            admission=admission,
            make_room=self._make_room,
        )
        for one in self._listeners:
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, partial(self.accept, one))

    def accept(self, listener: Listener) -> None:
        """Accept a connection, unless it is not allowed. It becomes a session with its HELLO."""
        is_remote = listener.family != socket.AF_UNIX
        try:
            accepted = accept(listener)
        except OSError as error:
            LOG.warning("a connection could not be accepted: %s", error)
            reason = f"the engine cannot accept connections: {error}"
            self._spare.turn_away(listener, Overloaded(reason, retry_after_s=1.0))
            return
        if accepted is None:
            return
        sock, peer = accepted
        if not may_connect(peer, self._uids):
            turn_away(sock, NotReady(f"user {peer.uid} may not connect: see server.socket_uids"))
            return
        if len(self.ungreeted) >= max(LEAST_UNGREETED, self._server.max_sessions // 2):
            counts = Counter(self.ungreeted.values())  # the oldest of the host with the most
            oldest = max(self.ungreeted, key=lambda one: counts[self.ungreeted[one]])
            reason = f"{len(self.ungreeted)} connections have not sent HELLO, and more come"
            oldest.refuse(Overloaded(f"{reason}: send it at once", retry_after_s=1.0))
            del self.ungreeted[oldest]
            self.look_after(oldest)
        self._number += 1
        address = ""
        if is_remote:
            tune(sock)
            address = address_of_peer(sock)
        session = Session(
            sock, self._number, self._config, self._state, peer.pid, peer.uid, is_remote=is_remote
        )
        self.sessions.add(session)
        self.ungreeted[session] = address
        self._selector.register(session, selectors.EVENT_READ, session)

    def receive(self, ready: list[Any], began: float) -> Iterator[Event]:
        """The events of the sessions that are `ready`, in order, read for `RECEIVE_S` at most since
        `began`. Other descriptors of the selector have functions, which are called."""
        passed_over, slow = self._passed_over, self._slow
        if passed_over or slow:
            ready.sort(key=lambda one: (one[0].fd not in passed_over, one[0].fd in slow))
            passed_over.clear()
            slow.clear()
        now = began
        for number, (key, mask) in enumerate(ready):
            if number and now - began > RECEIVE_S:
                passed_over.update(other.fd for other, _ in ready[number:])
                break  # they are still ready in the next round, and the first then
            if callable(key.data):
                key.data()
            else:
                yield from self.read(key.data, mask)
            started, now = now, time.monotonic()
            if now - started > SLOW_S:
                slow.add(key.fd)

    def read(self, session: Session, mask: int) -> Sequence[Event]:
        """Serve a session whose socket is ready; its new calls, in order."""
        if mask & selectors.EVENT_WRITE:
            session.flush()
        events: Sequence[Event] = session.read() if mask & selectors.EVENT_READ else ()
        if self.ungreeted and session.greeted:
            self.ungreeted.pop(session, None)
        self.look_after(session)
        return events

    def close_ended(self) -> list[Call]:
        """Close the sessions that are over; their unanswered calls, whose callers have left."""
        if self.ungreeted:
            self._end_silent()
        ended, self.ended = self.ended, []
        calls: list[Call] = []
        for session in ended:
            calls += session.live.values()
            self._selector.unregister(session)
            self.sessions.discard(session)
            self.ungreeted.pop(session, None)
            session.close()
        return calls

    def fail(
        self, call: Call, error: Exception, stages: Stages = NO_STAGES, needed: int = 0
    ) -> None:
        session = call.session
        session.fail(call, error, stages, needed=needed)
        self.look_after(session)

    def send_state(self, state: State) -> None:
        self._state = state
        for session in self.sessions:
            session.send_state(state)
            self.look_after(session)

    def beat(self) -> None:
        """Send the state to doors again, which shows that the engine is alive."""
        for session in self.sessions:
            if session.greeted and session.standing.is_door:
                session.send_state(self._state)
                self.look_after(session)

    def check_keys(self) -> None:
        """The keys were read again: end sessions whose key was revoked."""
        for session in self.sessions:
            try:
                session.standing.renew()
            except Unauthorized as error:
                session.refuse(error)
                self.look_after(session)

    def close(self, timeout_s: float) -> None:
        """Send pending output, for `timeout_s` at most, then close all sessions."""
        ends = time.monotonic() + timeout_s
        while any(one.wants_write and not one.ended for one in self.sessions):
            if time.monotonic() > ends:
                break
            for session in self.sessions:
                session.flush()
            time.sleep(0.001)
        for session in self.sessions:
            session.close()
        for listener in self._listeners:
            listener.close()
        self._spare.close()

    def look_after(self, session: Session) -> None:
        """Note a session that is over; watch its socket for room to write where output waits."""
        if session.closed:
            return
        if session.ended:
            if session not in self.ended:
                self.ended.append(session)
                LOG.debug("session %d (%s): %s", session.number, session.name, session.ended)
            return
        wants_write = bool(session.output.waiting)
        if wants_write != session.watched_for_room:
            session.watched_for_room = wants_write
            room = selectors.EVENT_WRITE if wants_write else 0
            self._selector.modify(session, selectors.EVENT_READ | room, session)

    def _end_silent(self) -> None:
        """End connections that have not sent HELLO in time."""
        now = time.monotonic()
        for session in self.ungreeted:
            if now - session.started > GREETING_S:
                session.end(f"no HELLO within {GREETING_S:g} s")
                self.look_after(session)

    def _make_room(self, namespace: str) -> None:
        """Raises Overloaded where all sessions, or the namespace's share of them, are taken. Not
        called for doors of the service, which always have a place."""
        greeted = [one for one in self.sessions if one.greeted]
        if len(greeted) >= self._server.max_sessions:
            reason = f"{len(greeted)} sessions are open: close some, or raise server.max_sessions"
            raise Overloaded(reason, retry_after_s=1.0)
        others = [one for one in greeted if not one.standing.is_door]
        count = sum(one.standing.tenants[0].namespace == namespace for one in others)
        if count >= self._namespace_limit:
            reason = f"this namespace has {count} sessions, its share of server.max_sessions"
            remedy = "close some, or raise engine.namespace_share"
            raise Overloaded(f"{reason}: {remedy}", retry_after_s=1.0)

    def _pin(self, memory: memoryview) -> bool:
        if len(memory) > self._server.pinned_arena_bytes:
            return False
        return self._backend.register(address_of(memory), len(memory))


def address_of_peer(sock: socket.socket) -> str:
    """A remote host's address; empty where it has disconnected."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""
