"""Everyone who is connected to the engine: sessions accepted, listened to, answered, let go."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from config.settings import ServerSettings
from kernels.backend import Backend
from kernels.lanes import address_of
from service.errors import NotReady, Overloaded, Unauthorized
from service.operations.info import InfoAnswer
from service.operations.table import BY_NAME
from service.road.arena import Pinning
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, Event, SessionConfig
from service.road.engine_end.listening import SpareDescriptor, accept, may_connect, turn_away
from service.road.engine_end.session import Session, Stages
from service.road.messages import State
from service.road.tcp import tune

LOG: Final = logging.getLogger("attnd.engine")
GREETING_S: Final = 10.0
"""A connection that has not said HELLO by then is closed."""
LEAST_UNGREETED: Final = 16
"""So many connections may be about to say it, however few sessions there may be."""
NO_STAGES: Final = (0.0,) * 6


class Callers:
    """The sessions of one engine, on its selector; sessions are the data of their sockets."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        server: ServerSettings,
        backend: Backend,
        info: InfoAnswer,
        admission: Admission,
        unpin: Callable[[memoryview], object],
        remote: socket.socket | None = None,
        share: float = 1.0,
    ) -> None:
        """`remote`: where doors of other hosts come in over TCP; `share`: what one namespace may
        have of server.max_sessions."""
        self._most_of_one = max(1, int(server.max_sessions * share))
        self._listeners = [listener] if remote is None else [listener, remote]
        self._selector = selector
        self._server = server
        self._backend = backend
        self._state = State("ready", "ready")
        self._uids = frozenset(server.socket_uids)
        self._sessions: set[Session] = set()
        self._ungreeted: dict[Session, str] = {}
        """Connections that have not said HELLO, oldest first, with their hosts' addresses. They do
        not count as sessions, so they can keep nobody out."""
        self._gone: list[Session] = []
        self._number = 0
        self._spare = SpareDescriptor()
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

    @property
    def count(self) -> int:
        return len(self._sessions)

    @property
    def patience(self) -> float | None:
        """How long nobody needs to be looked after."""
        return 1.0 if self._ungreeted else None

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, unless it is not allowed. It becomes a session with its HELLO."""
        is_remote = listener.family != socket.AF_UNIX
        try:
            accepted = accept(listener)
        except OSError as error:
            LOG.warning("a connection could not be accepted: %s", error)
            told = f"the engine cannot take connections: {error}"
            self._spare.turn_away(listener, Overloaded(told, retry_after_s=1.0))
            return
        if accepted is None:
            return
        sock, who = accepted
        if not may_connect(who, self._uids):
            turn_away(sock, NotReady(f"user {who.uid} may not connect: see server.socket_uids"))
            return
        if len(self._ungreeted) >= max(LEAST_UNGREETED, self._server.max_sessions // 2):
            oldest = oldest_of_most_crowded(self._ungreeted)
            told = f"{len(self._ungreeted)} connections have not said HELLO, and more come"
            oldest.refuse(Overloaded(f"{told}: say it at once", retry_after_s=1.0))
            del self._ungreeted[oldest]
            self._look_after(oldest)
        self._number += 1
        address = ""
        if is_remote:
            tune(sock)
            address = address_of_peer(sock)
        session = Session(
            sock, self._number, self._config, self._state, who.pid, who.uid, is_remote=is_remote
        )
        self._sessions.add(session)
        self._ungreeted[session] = address
        self._selector.register(session, selectors.EVENT_READ, session)

    def ready(self, session: Session, mask: int) -> Sequence[Event]:
        """What a session's socket is ready for: its new calls, in order."""
        if mask & selectors.EVENT_WRITE:
            session.flush()
        events: Sequence[Event] = session.read() if mask & selectors.EVENT_READ else ()
        if self._ungreeted and session.greeted:
            self._ungreeted.pop(session, None)
        self._look_after(session)
        return events

    def left(self) -> list[Call]:
        """Calls of sessions that are over; nobody waits for them any more."""
        if self._ungreeted:
            self._close_silent()
        if not self._gone:
            return []
        gone, self._gone = self._gone, []
        calls: list[Call] = []
        for session in gone:
            calls += session.live.values()
            self._selector.unregister(session)
            self._sessions.discard(session)
            self._ungreeted.pop(session, None)
            session.close()
        return calls

    def answer(self, call: Call, status: int, length: int, stages: Stages, held: int) -> None:
        session = call.session
        session.answer(call, status, length, stages, held)
        self._look_after(session)

    def fail(
        self, call: Call, error: Exception, stages: Stages = NO_STAGES, needed: int = 0
    ) -> None:
        session = call.session
        session.fail(call, error, stages, needed=needed)
        self._look_after(session)

    def tell(self, state: State) -> None:
        """Push the engine's state to all."""
        self._state = state
        for session in self._sessions:
            session.send_state(state)
            self._look_after(session)

    def beat(self) -> None:
        """Tell doors that the engine is there."""
        for session in self._sessions:
            if session.greeted and session.standing.is_door:
                session.send_state(self._state)
                self._look_after(session)

    def check_keys(self) -> None:
        """The keys were read again: sessions whose key is gone end."""
        for session in self._sessions:
            try:
                session.standing.renew()
            except Unauthorized as error:
                session.refuse(error)
                self._look_after(session)

    def close(self, timeout_s: float) -> None:
        """Send what is still to be sent, then let everyone go."""
        ends = time.monotonic() + timeout_s
        while any(one.wants_write and not one.ended for one in self._sessions):
            if time.monotonic() > ends:
                break
            for session in self._sessions:
                session.flush()
            time.sleep(0.001)
        for session in self._sessions:
            session.close()
        for listener in self._listeners:
            listener.close()
        self._spare.close()

    def _look_after(self, session: Session) -> None:
        """Note a session that is over; watch for room to write where something waits."""
        if session.closed:
            return
        if session.ended:
            if session not in self._gone:
                self._gone.append(session)
                LOG.debug("session %d (%s): %s", session.number, session.name, session.ended)
            return
        if session.wants_write != session.watched_for_room:
            session.watched_for_room = session.wants_write
            room = selectors.EVENT_WRITE if session.wants_write else 0
            self._selector.modify(session, selectors.EVENT_READ | room, session)

    def _close_silent(self) -> None:
        now = time.monotonic()
        for session in self._ungreeted:
            if now - session.started > GREETING_S:
                session.end(f"no HELLO within {GREETING_S:g} s")
                self._look_after(session)

    def _make_room(self, namespace: str) -> None:
        """Raises Overloaded where all sessions are taken, or the share of a namespace. Doors of
        the service are not asked: there is always a place for them."""
        greeted = [one for one in self._sessions if one.greeted]
        if len(greeted) >= self._server.max_sessions:
            told = f"{len(greeted)} sessions are open: close some, or raise server.max_sessions"
            raise Overloaded(told, retry_after_s=1.0)
        others = [one for one in greeted if not one.standing.is_door]
        count = sum(one.standing.tenants[0].namespace == namespace for one in others)
        if count >= self._most_of_one:
            told = f"this namespace has {count} sessions, its share of server.max_sessions"
            remedy = "close some, or raise engine.namespace_share"
            raise Overloaded(f"{told}: {remedy}", retry_after_s=1.0)

    def _pin(self, memory: memoryview) -> bool:
        if len(memory) > self._server.pinned_arena_bytes:
            return False
        return self._backend.register(address_of(memory), len(memory))


def oldest_of_most_crowded(ungreeted: Mapping[Session, str]) -> Session:
    """The oldest connection of the host with the most."""
    counts = Counter(ungreeted.values())
    return max(ungreeted, key=lambda one: counts[ungreeted[one]])


def address_of_peer(sock: socket.socket) -> str:
    """A remote host's address; empty where it has left already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""
