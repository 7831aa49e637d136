"""What HTTP libraries cost a client beyond the same call on a raw socket.

`python -m bench.client_transport` prints two tables. The first sends a body to the bare echo by
each library and reads as many bytes back; the second decodes on the service by a raw socket, by the
clients of `attnd`, and over the road. All take turns in every round, so that each sees the same
machine. Libraries that are not installed are left out (`pip install httpx urllib3 aiohttp`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Final

import attnd
import numpy as np
from attnd.http.async_transport import LoopTransport
from attnd.http.blocking_transport import SocketTransport
from attnd.http.messages import Request
from attnd.http.origin import origin_of
from attnd.wire import images
from numpy.typing import NDArray

from bench.machine import provenance
from bench.servers import Server, echo
from bench.servers import attnd as service

SIZES: Final = (8192, 1048576)
KV_LEN: Final = 64
HEAD_DIM: Final = 64
PACKAGES: Final = ("httptools", "httpx", "httpcore", "urllib3", "aiohttp", "uvicorn", "uvloop")

LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)(?s:.)*?\r\n\r\n")

Once = Callable[[], object]
OnceAsync = Callable[[], Awaitable[object]]
Opened = tuple[OnceAsync, Callable[[], Coroutine[Any, Any, None]]]
"""One call, and how to close what it needs."""
Loop = Callable[[int], list[float]]
"""Makes a call so many times and gives each one's seconds."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=25, help="of each way in each round")
    chosen = parser.parse_args(argv)
    told = provenance(PACKAGES)
    print(f"{told['machine']}; {told['date'][:10]}; `{told['command']}`; {told['versions']}\n")
    with asyncio.Runner() as runner:
        with echo() as server, ExitStack() as stack:
            for size in SIZES:
                title = f"echo, {size // 1024} KiB"
                ways = libraries(server.port, size, runner, stack)
                measure(title, ways, chosen.rounds, chosen.calls)
        options = ("--pool.num-kv-heads", "1", "--pool.head-dim", str(HEAD_DIM))
        with service(*options, "--pool.num-layers", "1") as server, ExitStack() as stack:
            for size in SIZES:
                title = f"decode, {size // 1024} KiB"
                ways = decodes(server, size, runner, stack)
                measure(title, ways, chosen.rounds, chosen.calls)


def measure(title: str, ways: dict[str, Loop], rounds: int, calls: int) -> None:
    """Let the ways take turns, and print p50 and p99 of each, and p50 beyond the first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, loop in ways.items():
            gc.collect()
            taken = loop(calls)
            seconds[name] += taken if i else []  # the first round warms up
    print(f"| {title} | p50 ms | p99 ms | beyond the raw socket, p50 ms |\n|---|---|---|---|")
    base = float(np.median(next(iter(seconds.values()))))
    for name, taken in seconds.items():
        p50, p99 = np.percentile(taken, (50, 99))
        print(f"| {name} | {p50 * 1e3:.3f} | {p99 * 1e3:.3f} | {(p50 - base) * 1e3:.3f} |")
    print(flush=True)


def repeated(once: Once) -> Loop:
    def loop(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            once()
            taken.append(time.perf_counter() - began)
        return taken

    return loop


def awaited(runner: asyncio.Runner, once: OnceAsync) -> Loop:
    async def loop(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            await once()
            taken.append(time.perf_counter() - began)
        return taken

    return lambda count: runner.run(loop(count))


def raw_socket(port: int, whole: bytes) -> Loop:
    """A request as it is, on a connection of each round; the answer goes into one buffer."""
    view = memoryview(bytearray(2 * len(whole) + 65536))

    def loop(count: int) -> list[float]:
        with socket.create_connection(("127.0.0.1", port)) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def once() -> None:
                connected.sendall(whole)
                have, end = 0, None
                while end is None or have < end:
                    have += connected.recv_into(view[have:])
                    end = end or whole_answer(view[:have])

            return repeated(once)(count)

    return loop


def whole_answer(received: memoryview) -> int | None:
    """How long the answer is, once its head is there."""
    found = LENGTH.search(received)
    return found.end() + int(found[1]) if found else None


def libraries(port: int, size: int, runner: asyncio.Runner, stack: ExitStack) -> dict[str, Loop]:
    """POST `size` bytes to the echo, which answers as many, by each library there is."""
    body, path = os.urandom(size), f"/{size}"
    url = f"http://127.0.0.1:{port}"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n"
    whole = head.encode() + body
    request = Request("POST", path, {"x-request-id": "bench"}, (memoryview(body),), 30.0)
    blocking = SocketTransport(origin_of(url, None))
    awaiting = LoopTransport(origin_of(url, None))
    ways = {
        "raw socket": raw_socket(port, whole),
        "httptools and sockets (attnd.http)": repeated(lambda: blocking.send(request)),
        "the same, asyncio": awaited(runner, lambda: awaiting.send(request)),
        "http.client": repeated(standard(port, path, body)),
    }
    for name, make in OTHERS.items():
        try:
            ways[name] = repeated(make(url, path, body))
        except ImportError:
            print(f"{name} is not installed")
    for name, make_async in OTHERS_ASYNC.items():
        try:
            once, close = runner.run(make_async(url, path, body))
        except ImportError:
            print(f"{name} is not installed")
        else:
            stack.callback(ended, runner, close)
            ways[name] = awaited(runner, once)
    return ways


def ended(runner: asyncio.Runner, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    runner.run(close())


def standard(port: int, path: str, body: bytes) -> Once:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def once() -> bytes:
        connection.request("POST", path, body)
        return connection.getresponse().read()

    return once


def urllib3(url: str, path: str, body: bytes) -> Once:
    pool = import_module("urllib3").connection_from_url(url)
    return lambda: pool.request("POST", path, body=body, retries=False).data


def httpcore(url: str, path: str, body: bytes) -> Once:
    pool = import_module("httpcore").ConnectionPool()
    return lambda: pool.request("POST", url + path, content=body).content


def httpx(url: str, path: str, body: bytes) -> Once:
    client = import_module("httpx").Client(base_url=url)
    return lambda: client.request("POST", path, content=body).content


async def httpx_async(url: str, path: str, body: bytes) -> Opened:
    client = import_module("httpx").AsyncClient(base_url=url)

    async def once() -> Any:
        return (await client.request("POST", path, content=body)).content

    return once, client.aclose


async def aiohttp(url: str, path: str, body: bytes) -> Opened:
    module = import_module("aiohttp")
    # It takes a connection that the echo closed (5 s) for a good one.
    session = module.ClientSession(url, connector=module.TCPConnector(keepalive_timeout=1))

    async def once() -> Any:
        async with session.post(path, data=body) as response:
            return await response.read()

    return once, session.close


OTHERS: Final = {"urllib3": urllib3, "httpcore": httpcore, "httpx": httpx}
OTHERS_ASYNC: Final = {"aiohttp": aiohttp, "httpx, asyncio": httpx_async}


def decodes(server: Server, size: int, runner: asyncio.Runner, stack: ExitStack) -> dict[str, Loop]:
    """One sequence decodes a fp16 q of `size` bytes: by a raw socket, and by the clients."""
    url = f"http://127.0.0.1:{server.port}"
    client = stack.enter_context(attnd.Client(url))
    session = stack.enter_context(attnd.Session(server.socket))
    other = attnd.AsyncClient(url)
    name = client.create_sequence().id
    k = random((KV_LEN, 1, HEAD_DIM))
    client.append(0, [name], k, k, append_indptr=[0, KV_LEN], offsets=[0])
    q = random((1, size // 2 // HEAD_DIM, HEAD_DIM))
    placed = session.empty("q", q.shape, q.dtype)
    placed[...] = q
    body = b"".join(images.encode({"layer": 0, "sequences": [name]}, {"q": q}))
    head = f"POST /v1/decode HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    whole = f"{head}content-type: {images.MEDIA_TYPE}\r\n\r\n".encode() + body
    return {
        "raw socket": raw_socket(server.port, whole),
        "attnd.Client": repeated(lambda: client.decode(0, [name], q)),
        "attnd.AsyncClient": awaited(runner, lambda: other.decode(0, [name], q)),
        "attnd.Session": repeated(lambda: session.decode(0, [name], q)),
        "attnd.Session, q in the arena": repeated(lambda: session.decode(0, [name], placed)),
    }


def random(shape: tuple[int, ...]) -> NDArray[np.float16]:
    return np.random.default_rng().standard_normal(shape, dtype=np.float32).astype(np.float16)


if __name__ == "__main__":
    main()
