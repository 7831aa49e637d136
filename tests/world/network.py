"""Virtual time, and sockets in memory: bytes arrive late, in pieces, or never."""

from __future__ import annotations

import array
import os
import random
import secrets
import selectors
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from service.road.engine_end.listening import CREDENTIALS

TICK_S: Final = 2e-6  # time that passes at every look at the clock, so that no loop waits for ever
STALLS_S: Final = (1e-4, 1e-3, 5e-3, 0.03, 0.2)  # pauses of a process between two such looks
CAPACITIES: Final = (2**10, 2**15)  # bytes under way in one direction: more have to wait
SLOW: Final = (0.005, 0.02, 0.02, 0.5)  # shares of late pieces, by how far two processes are
FIRST_FD: Final = 10**6  # numbers of the world's sockets; no descriptor of the system is so large
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
NEVER: Final = float("inf")
Fault = Callable[[str, float], bool]  # whether a named one happens now, by its share of the cases
Wait = Callable[[float | None], None]  # lets the world run for some seconds
Replaced = tuple[Any, str, Any]  # an owner, the name of its attribute, and another value


class Clock:
    """The world's time, in seconds. It moves when it is read, and by `advance`."""

    def __init__(self, order: random.Random, stalls: float) -> None:
        """`stalls`: the share of looks at the clock before which the process paused."""
        self.now = 1000.0
        self._order, self._stalls = order, stalls

    def monotonic(self) -> float:
        self.now += TICK_S
        if self._order.random() < self._stalls:
            self.now += self._order.choice(STALLS_S)
        return self.now

    def advance(self, to: float) -> None:
        self.now = max(self.now, to)


def virtual(clock: Clock, order: random.Random) -> list[Replaced]:
    """In place of every clock and source of randomness of the process; beside these the service
    reads only the module `random`, which the world seeds."""
    return [
        (time, "monotonic", clock.monotonic),
        (time, "perf_counter", clock.monotonic),
        (time, "time", lambda: clock.monotonic() + 1.7e9),
        (time, "time_ns", lambda: int((clock.monotonic() + 1.7e9) * 1e9)),
        (time, "sleep", lambda seconds: clock.advance(clock.now + seconds)),
        (secrets, "token_bytes", lambda size=32: order.randbytes(size)),
        (secrets, "token_hex", lambda size=32: order.randbytes(size).hex()),
        (uuid, "uuid4", lambda: uuid.UUID(bytes=order.randbytes(16), version=4)),
        (os, "urandom", order.randbytes),
    ]


class SimSocket:
    """What the service needs of `socket.socket`, at one end of a connection, with what is under way
    to this end. `pair` is the connection's number, the same at both ends."""

    family = socket.AF_UNIX

    def __init__(self, network: Network, pair: int = 0, way: int = 0) -> None:
        self.network, self.pair, self.fd = network, pair, next(network.numbers)
        network.by_fd[self.fd] = self
        self.order = random.Random(f"{network.seed} {pair} {way}")
        self.slow, self.capacity = self.order.choice(SLOW), self.order.choice(CAPACITIES)
        self.chunks: deque[tuple[float, bytes]] = deque()  # under way, with their arrival
        self.arrived = bytearray()
        self.descriptors: list[int] = []
        self.unread = 0  # bytes that were sent and not read
        self.latest = 0.0  # when the last bytes arrive
        self.deaf_until = 0.0  # until when the process reads nothing
        self.ends = NEVER  # when it sees the end
        self.is_reset = self.is_closed = self.is_broken = False
        self.peer = self
        self.selector: SimSelector | None = None

    def fileno(self) -> int:
        return -1 if self.is_closed else self.fd

    def setsockopt(self, *_: Any) -> None:
        """Options make no difference here, and no socket ever blocks."""

    setblocking = setsockopt

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.pair

    getpeername = getsockname

    def getsockopt(self, *_: Any) -> bytes:
        return CREDENTIALS.pack(0, os.getuid(), os.getgid())

    def ready_at(self, events: int) -> float:
        """When one of the events has come, as things are now."""
        peer = self.peer
        if events & WRITE and (peer.ends < NEVER or peer.unread < peer.capacity):
            return 0.0
        if not events & READ:
            return NEVER
        arrives = self.chunks[0][0] if self.chunks else self.ends
        return max(0.0 if self.arrived else arrives, self.deaf_until)

    def changed(self) -> None:
        """Both ends may be ready at another time than before."""
        for end in (self, self.peer):
            if end.selector is not None:
                end.selector.known = None

    def arrive(self) -> None:
        while self.chunks and self.chunks[0][0] <= self.network.clock.now:
            self.arrived += self.chunks.popleft()[1]

    def put(self, data: bytes) -> None:
        """Bytes are on their way to this end, in pieces."""
        order = self.order
        self.unread += len(data)
        while data:
            cut = order.randint(1, len(data)) if order.random() < 0.1 else len(data)
            kind, late = order.random(), 1e-6 * 10.0 ** (3 * order.random())
            if kind < self.slow:
                late = 0.3 * order.random()
            self.latest = max(self.latest, self.network.clock.now + late)
            self.chunks.append((self.latest, data[:cut]))
            data = data[cut:]
        self.changed()

    def send(self, data: Any) -> int:
        peer, network = self.peer, self.network
        if self.is_closed:
            raise OSError(9, "closed")
        if peer.ends < NEVER:
            raise BrokenPipeError(32, "the other end is closed")
        if peer.unread >= peer.capacity:
            raise BlockingIOError(11, "full")
        data = bytes(data)[: peer.capacity - peer.unread]
        if len(data) > 1 and network.fault("partial send", 0.01):
            data = data[: peer.order.randint(1, len(data) - 1)]
        peer.put(data)
        if network.fault("connection breaks", 0.0003):
            self.break_off()
        return len(data)

    def sendmsg(self, buffers: Sequence[Any], ancillary: Any = (), *_: Any) -> int:
        for _, _, content in ancillary:
            self.peer.descriptors += map(os.dup, array.array("i", content))
        return self.send(b"".join(bytes(one) for one in buffers))

    def recv(self, size: int) -> bytes:
        now, network = self.network.clock.now, self.network
        if self.is_closed:
            raise OSError(9, "closed")
        self.arrive()
        if self.fd < self.peer.fd and network.fault("caller stops reading", 0.0003):
            self.deaf_until = now + self.order.choice((0.3, 1.0, 4.0))
        if self.ready_at(READ) > now:
            raise BlockingIOError(11, "nothing has arrived")
        if self.is_reset and not self.arrived:
            raise ConnectionResetError(104, "reset")
        if size > 1 and len(self.arrived) > 1 and network.fault("short read", 0.01):
            size = self.order.randint(1, min(size, len(self.arrived)) - 1)
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        self.unread -= len(data)
        self.changed()
        return data

    def recv_into(self, buffer: Any) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def recvmsg(self, size: int, *_: Any) -> tuple[bytes, list[Any], int, None]:
        data, rights = self.recv(size), array.array("i", self.descriptors).tobytes()
        self.descriptors = []
        found = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        return data, found, 0, None

    def close(self) -> None:
        if not self.is_closed:
            self.shutdown(lost=self.is_broken)
            self.is_closed = True
            self.network.by_fd.pop(self.fd)

    def break_off(self) -> None:
        """The connection is over, though both processes live. The caller's end is the later one to
        see it: the engine may still write to the arena until it has closed its own."""
        engine = max(self, self.peer, key=lambda end: end.fd)
        engine.ends, engine.is_broken = min(engine.ends, self.network.clock.now), True
        self.changed()

    def kill(self) -> None:
        """The process at this end dies: what is under way may be lost. Its end is closed later."""
        self.shutdown(lost=True)

    def shutdown(self, _: int = socket.SHUT_RDWR, *, lost: bool = False) -> None:
        now, peer = self.network.clock.now, self.peer
        peer.arrive()
        if peer.ends == NEVER:
            if lost and peer.chunks and self.network.fault("frames lost", 0.5):
                for _ in range(peer.order.randint(1, len(peer.chunks))):
                    peer.unread -= len(peer.chunks.pop()[1])
                peer.is_reset = True
            peer.ends = max(now, peer.chunks[-1][0] if peer.chunks else now)
        self.ends = min(self.ends, now)
        self.changed()
        while self.descriptors:
            os.close(self.descriptors.pop())


class Listener(SimSocket):
    """A listening socket; `dial` connects to it."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.backlog: deque[SimSocket] = deque()

    def ready_at(self, events: int) -> float:
        return 0.0 if self.backlog and events & READ else NEVER

    def accept(self) -> tuple[SimSocket, None]:
        if not self.backlog:
            raise BlockingIOError(11, "no connection")
        self.changed()
        return self.backlog.popleft(), None

    def dial(self) -> SimSocket:
        """A new connection; its caller's end. Raises ConnectionRefusedError."""
        if self.is_closed:
            raise ConnectionRefusedError(111, "no engine listens")
        here, there = self.network.pair()
        self.backlog.append(there)
        self.changed()
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
        self.by_fd: dict[int, SimSocket] = {}
        self.numbers, self.pairs = count(FIRST_FD), count(1)

    def pair(self) -> tuple[SimSocket, SimSocket]:
        """The two ends of a new connection."""
        number = next(self.pairs)
        here, peer = (SimSocket(self, number, way) for way in (1, 0))
        here.peer, peer.peer = peer, here
        return here, peer


class SimSelector(selectors._BaseSelectorImpl):  # type: ignore[misc]
    """Finds the world's sockets that are ready, after a wait."""

    def __init__(self, network: Network, order: random.Random, wait: Wait = lambda _: None) -> None:
        super().__init__()
        self._network, self._order, self._wait = network, order, wait
        self.known: float | None = None  # when a socket is ready; None: something has changed
        self.is_woken = False
        self.workers: list[Any] = []  # of the engine that waits here, instead of threads

    def wake(self) -> None:
        """In place of a byte in the engine's pipe."""
        self.is_woken = True

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
        if self.is_woken:
            return 0.0
        if self.known is None:
            by_fd, keys = self._network.by_fd, self._fd_to_key.items()
            found = (by_fd[fd].ready_at(key.events) for fd, key in keys if fd in by_fd)
            self.known = min(found, default=NEVER)
        return self.known

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        self.is_woken = False
        found, now, by_fd = [], self._network.clock.now, self._network.by_fd
        if self.ready_at() > now:
            return []
        for fd, key in self._fd_to_key.items():
            if (end := by_fd.get(fd)) is not None:
                ready = [one for one in (READ, WRITE) if end.ready_at(key.events & one) <= now]
                if ready:
                    found.append((key, sum(ready)))
        self._order.shuffle(found)
        return found
