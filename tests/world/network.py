"""Sockets in memory: every byte arrives late, in pieces, or is lost with its connection."""

from __future__ import annotations

import array
import os
import random
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from service.road.engine_end.listening import CREDENTIALS
from tests.world.clock import Clock

CAPACITIES: Final = (2**10, 2**15)
"""Bytes that a connection holds in one direction before its sender has to wait."""
SLOW: Final = (0.005, 0.02, 0.02, 0.5)
"""Shares of a connection's pieces that arrive late: one process may be far from another."""
FIRST_FD: Final = 10**6
"""Numbers of the world's sockets; no descriptor of the system is so large."""


READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
NEVER: Final = float("inf")
Fault = Callable[[str, float], bool]
"""Whether a named fault happens now, by its share of the cases; counts it."""


@dataclass(slots=True)
class Pipe:
    """One direction of a connection."""

    order: random.Random
    slow: float
    capacity: int
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Bytes under way, with the time of their arrival."""
    arrived: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    ends: float = NEVER
    """When the reader sees the end."""
    is_reset: bool = False
    latest: float = 0.0
    unread: int = 0
    """Bytes that were sent and not read."""

    def put(self, data: bytes, now: float) -> None:
        """Send bytes on their way, in one to three pieces."""
        order = self.order
        self.unread += len(data)
        while data:
            cut = order.randint(1, len(data)) if order.random() < 0.1 else len(data)
            kind, late = order.random(), 1e-6 * 10.0 ** (3 * order.random())
            if kind < self.slow:
                late = 0.3 * order.random()
            self.latest = max(self.latest, now + late)
            self.chunks.append((self.latest, data[:cut]))
            data = data[cut:]

    def arrive(self, now: float) -> None:
        while self.chunks and self.chunks[0][0] <= now:
            self.arrived += self.chunks.popleft()[1]

    @property
    def readable_at(self) -> float:
        """When its reader sees bytes or the end, as things are now."""
        if self.arrived:
            return 0.0
        return self.chunks[0][0] if self.chunks else self.ends


class SimSocket:
    """What the road needs of `socket.socket`, at one end of a connection."""

    family = socket.AF_UNIX

    def __init__(self, network: Network, fd: int, incoming: Pipe, outgoing: Pipe) -> None:
        self.network, self.fd = network, fd
        self.incoming, self.outgoing = incoming, outgoing
        self.is_closed = False
        self.deaf_until = 0.0
        """Until when its process reads nothing."""
        self.pair = 0
        """The connection's number, the same at both ends."""
        self.peer = self
        self.selector: SimSelector | None = None

    def fileno(self) -> int:
        return -1 if self.is_closed else self.fd

    def setblocking(self, flag: bool) -> None:
        """The world's sockets never block."""

    def setsockopt(self, *_: Any) -> None:
        """Options make no difference here."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.pair

    getpeername = getsockname

    def gettimeout(self) -> float:
        return 0.0

    def getsockopt(self, *_: Any) -> bytes:
        return CREDENTIALS.pack(0, os.getuid(), os.getgid())

    def ready_at(self, events: int) -> float:
        """When one of the events has come, as things are now."""
        out = self.outgoing
        if events & WRITE and (out.ends < NEVER or out.unread < out.capacity):
            return 0.0
        return max(self.incoming.readable_at, self.deaf_until) if events & READ else NEVER

    def send(self, data: Any) -> int:
        if self.is_closed:
            raise OSError(9, "closed")
        if self.outgoing.ends < NEVER:
            raise BrokenPipeError(32, "the other end is closed")
        data = bytes(data)
        room = self.outgoing.capacity - self.outgoing.unread
        if room <= 0:
            raise BlockingIOError(11, "full")
        data = data[:room]
        if len(data) > 1 and self.network.fault("partial send", 0.01):
            data = data[: self.outgoing.order.randint(1, len(data) - 1)]
        self.outgoing.put(data, self.network.clock.now)
        changed(self, self.peer)
        if self.network.fault("connection breaks", 0.0003):
            self.kill()
        return len(data)

    def sendmsg(self, buffers: Sequence[Any], ancillary: Any = (), *_: Any) -> int:
        for _, _, content in ancillary:
            numbers = array.array("i", content)
            self.outgoing.descriptors += [os.dup(number) for number in numbers]
        return self.send(b"".join(bytes(one) for one in buffers))

    def recv(self, size: int) -> bytes:
        incoming, now = self.incoming, self.network.clock.now
        if self.is_closed:
            raise OSError(9, "closed")
        incoming.arrive(now)
        if self.fd < self.peer.fd and self.network.fault("caller stops reading", 0.0003):
            self.deaf_until = now + incoming.order.choice((0.3, 1.0, 4.0))
        if max(incoming.readable_at, self.deaf_until) > now:
            raise BlockingIOError(11, "nothing has arrived")
        if incoming.is_reset and not incoming.arrived:
            raise ConnectionResetError(104, "reset")
        if size > 1 and len(incoming.arrived) > 1 and self.network.fault("short read", 0.01):
            size = incoming.order.randint(1, min(size, len(incoming.arrived)) - 1) or 1
        data = bytes(incoming.arrived[:size])
        del incoming.arrived[:size]
        incoming.unread -= len(data)
        changed(self, self.peer)
        return data

    def recv_into(self, buffer: Any) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def recvmsg(self, size: int, *_: Any) -> tuple[bytes, list[Any], int, None]:
        data = self.recv(size)
        numbers, self.incoming.descriptors = self.incoming.descriptors, []
        rights = array.array("i", numbers).tobytes()
        found = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if numbers else []
        return data, found, 0, None

    def shutdown(self, _: int) -> None:
        self._end(lost=False)

    def close(self) -> None:
        if not self.is_closed:
            self._end(lost=False)
            self.is_closed = True
            self.network.by_fd.pop(self.fd)

    def kill(self) -> None:
        """The process at this end dies: what is under way may be lost. Its end is closed later."""
        self._end(lost=True)

    def _end(self, lost: bool) -> None:
        now, out = self.network.clock.now, self.outgoing
        out.arrive(now)
        if out.ends == NEVER:
            if lost and out.chunks and self.network.fault("frames lost", 0.5):
                for _ in range(out.order.randint(1, len(out.chunks))):
                    out.unread -= len(out.chunks.pop()[1])
                out.is_reset = True
            out.ends = max(now, out.chunks[-1][0] if out.chunks else now)
        self.incoming.ends = min(self.incoming.ends, now)
        changed(self, self.peer)
        for number in self.incoming.descriptors:
            os.close(number)
        self.incoming.descriptors = []


class Listener:
    """A listening socket; `dial` connects to it."""

    family = socket.AF_UNIX

    def __init__(self, network: Network) -> None:
        self.network, self.fd = network, network.new_fd()
        self.backlog: deque[SimSocket] = deque()
        self.is_closed = False
        self.selector: SimSelector | None = None
        network.by_fd[self.fd] = self

    def fileno(self) -> int:
        return self.fd

    def setblocking(self, flag: bool) -> None:
        """The world's sockets never block."""

    def ready_at(self, events: int) -> float:
        return 0.0 if self.backlog and events & READ else NEVER

    def accept(self) -> tuple[SimSocket, None]:
        if not self.backlog:
            raise BlockingIOError(11, "no connection")
        changed(self)
        return self.backlog.popleft(), None

    def dial(self) -> SimSocket:
        """A new connection; its caller's end. Raises ConnectionRefusedError."""
        if self.is_closed:
            raise ConnectionRefusedError(111, "no engine listens")
        here, there = self.network.pair()
        self.backlog.append(there)
        changed(self)
        return here

    def close(self) -> None:
        self.is_closed = True
        self.network.by_fd.pop(self.fd, None)
        for sock in self.backlog:
            sock.close()


class Network:
    """All connections of the world."""

    def __init__(self, clock: Clock, seed: int, fault: Fault) -> None:
        self.clock, self.seed, self.fault = clock, seed, fault
        self.by_fd: dict[int, SimSocket | Listener] = {}
        self._last_fd, self._last_pair = FIRST_FD, 0

    def new_fd(self) -> int:
        self._last_fd += 1
        return self._last_fd

    def pair(self) -> tuple[SimSocket, SimSocket]:
        """The two ends of a new connection."""
        self._last_pair += 1
        orders = [random.Random(f"{self.seed} {self._last_pair} {way}") for way in range(2)]
        there, back = (Pipe(one, one.choice(SLOW), one.choice(CAPACITIES)) for one in orders)
        here = SimSocket(self, self.new_fd(), back, there)
        here.peer = SimSocket(self, self.new_fd(), there, back)
        here.peer.peer = here
        for end in (here, here.peer):
            end.pair = self._last_pair
            self.by_fd[end.fd] = end
        return here, here.peer


class SimSelector(selectors._BaseSelectorImpl):  # type: ignore[misc]
    """Finds the world's sockets that are ready; descriptors of the system never are.

    `wait` lets the world run until there is something to do, or for some seconds.
    """

    def __init__(
        self,
        network: Network,
        order: random.Random,
        wait: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._network, self._order, self._wait = network, order, wait
        self.known: float | None = None
        """When one of its sockets is ready; None: something has changed since."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self.known = None
        if (end := self._network.by_fd.get(key.fd)) is not None:
            end.selector = self
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self.known = None
        return super().unregister(fileobj)

    def ready_at(self) -> float:
        """When one of its sockets is ready, as things are now."""
        if self.known is None:
            by_fd, keys = self._network.by_fd, self._fd_to_key.items()
            found = (by_fd[fd].ready_at(key.events) for fd, key in keys if fd in by_fd)
            self.known = min(found, default=NEVER)
        return self.known

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        return self.ready()

    def ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found, now, by_fd = [], self._network.clock.now, self._network.by_fd
        if self.ready_at() > now:
            return []
        for fd, key in self._fd_to_key.items():
            if (end := by_fd.get(fd)) is not None:
                mask = READ if end.ready_at(key.events & READ) <= now else 0
                if key.events & WRITE and end.ready_at(WRITE) <= now:
                    mask |= WRITE
                if mask:
                    found.append((key, mask))
        if len(found) > 1:
            self._order.shuffle(found)
        return found


def changed(*ends: SimSocket | Listener) -> None:
    """They may be ready at another time than before."""
    for end in ends:
        if end.selector is not None:
            end.selector.known = None
