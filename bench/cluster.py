"""A trace replayed on one service, on separate ones with a perfect split, and on a cluster.

    python -m bench.cluster --trace FILE [--engines 2] [--requests 400] [--share 0.3] [--write]
    python -m bench.cluster --trace FILE --calibrate    # what calls cost, for bench.simulate
    python -m bench.cluster --made-up 200               # without a trace

FILE has the format of Mooncake's published traces. A block of 512 tokens becomes a page of 16, of
a prompt the first 64 are played, and a request decodes four tokens, so that processors without a
GPU can follow. Printed are throughput,
latency of requests, token hit rate beside that of one service with all the memory, small calls
answered a second, and what a call of a single caller takes longer through the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from attnd import AsyncClient, Client

from bench.machine import RESULTS, provenance, write_results
from bench.replay import POOL, Played, Processes, replay
from bench.servers import Server, attnd
from bench.simulation.calls import CallCosts
from bench.simulation.trace import Request, made_up, num_distinct, read_trace, shortened, split

CLUSTER_RESULTS: Final = RESULTS / "cluster-cpu.json"
CALIBRATION: Final = RESULTS / "calls-cpu.json"
LONGEST: Final = 64
"""Blocks of a prompt that are played."""
WORKERS: Final = 4
"""Requests at a time for each engine."""
SMALL_CALLS: Final = 3000
CALLERS: Final = 32
SLICE_S: Final = 0.02
"""`engine.slice_ms`, as the services are started with."""
UNSLICED_S: Final = 1e6
"""Where the engine's estimates call nothing of the trace long."""


def options(pages: int) -> list[str]:
    """Of a service whose pool has so many pages for each engine."""
    pool = POOL | {"num-pages": pages}
    told = [part for name, value in pool.items() for part in (f"--pool.{name}", str(value))]
    return [*told, "--log.level", "warning", "--server.deadline-s", "300"]


@contextmanager
def services(count: int, pages: int) -> Iterator[list[Server]]:
    """So many services, that share nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(attnd(*options(pages))) for _ in range(count)]


@contextmanager
def cluster(count: int, pages: int) -> Iterator[list[Server]]:
    """One door with so many engines behind it."""
    with attnd(*options(pages), "--cluster.engines", str(count)) as server:
        yield [server]


def children(server: Server) -> dict[str, list[int]]:
    """The processes of a service: `door` and `engine`, each with those of its kind."""
    found: dict[str, list[int]] = {"door": [], "engine": []}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
        if int(words[1]) == server.pid:
            kind = "engine" if "service.engine" in command else "door"
            found[kind].append(int(status.parent.name))
    return found


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def play(servers: Sequence[Server], requests: Sequence[Request], workers: int) -> Played:
    """The requests on all the servers, in a perfect split."""
    shares = split(requests, len(servers))
    given = [(url(server), share) for server, share in zip(servers, shares, strict=True)]
    return asyncio.run(replay(given, workers))


def calibrate(requests: Sequence[Request], pages: int) -> CallCosts:
    """What calls cost on one service, from requests one at a time; and how much slower a processor
    is beside a busy one, from a third of them again."""
    with services(1, pages) as (server,):
        pids = children(server)
        processes = Processes([[os.getpid()], pids["door"], pids["engine"]])
        shares = [(url(server), requests)]
        played = asyncio.run(replay(shares, 1, processes))
        some = requests[: len(requests) // 3]
        with Client(url(server)) as client:
            client.clear()
        with busy_processor():
            beside = asyncio.run(replay([(url(server), some)], 1, processes))
        with Client(url(server)) as client:
            is_sliced = slices(client.metrics()) > 0
    costs = CallCosts.fitted(played.calls, SLICE_S if is_sliced else UNSLICED_S)
    alone = sum(sum(costs.of(call.kind, call.new, call.pairs)) for call in beside.calls)
    together = alone / sum(sum(call.cpu_s) for call in beside.calls)
    return dataclasses.replace(costs, together=round(min(1.0, together), 3))


def slices(metrics: str) -> float:
    """Slices of long work that an engine has run."""
    found = re.findall(r"^attnd_slices_total (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


@contextmanager
def busy_processor() -> Iterator[None]:
    """A process beside this that does nothing, as fast as it can."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def small_calls(server: Server) -> dict[str, float]:
    """Calls a second by many callers, and the median milliseconds of one alone."""
    with Client(url(server)) as client:
        name = client.create_sequence().id
        spent = []
        for _ in range(500):
            begun = time.perf_counter()
            client.get_sequence(name)
            spent.append(time.perf_counter() - begun)

    async def many() -> float:
        client = AsyncClient(url(server))
        left = iter(range(SMALL_CALLS))

        async def one() -> None:
            for _ in left:
                await client.get_sequence(name)

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CALLERS)))
        rate = SMALL_CALLS / (time.perf_counter() - begun)
        await client.aclose()
        return rate

    return {"calls_per_s": round(asyncio.run(many()), 1), "call_ms": round(1e3 * median(spent), 3)}


def measure(name: str, servers: Sequence[Server], requests: Sequence[Request], workers: int) -> Any:
    """One row of the table, printed."""
    told = small_calls(servers[0])
    row = {"name": name, **play(servers, requests, workers).summary(), "small": told}
    print(row, flush=True)
    return row


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the cluster is held to: throughput beside separate services, hit rate beside one with
    all the memory, and what a call takes longer."""
    one, separate, whole = rows
    return {
        "throughput_of_separate": round(whole["requests_per_s"] / separate["requests_per_s"], 3),
        "hit_rate_of_one": round(whole["hit_rate"] / max(1e-9, one["hit_rate"]), 3),
        "calls_routed_per_s": whole["small"]["calls_per_s"],
        "added_ms": round(whole["small"]["call_ms"] - separate["small"]["call_ms"], 3),
    }


def chosen(args: argparse.Namespace) -> list[Request]:
    """The first requests of the trace, or made-up ones."""
    every = read_trace(args.trace) if args.trace else made_up(args.made_up)
    return shortened(every[args.skip : args.skip + args.requests], LONGEST)


def pages_for(requests: Sequence[Request], share: float, engines: int) -> int:
    """Of each engine, where all together have that share of the trace's distinct pages, and room
    for the longest prompts."""
    longest = max(len(request.blocks) for request in requests)
    return max(int(share * num_distinct(requests)) // engines, 2 * WORKERS * (longest + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--made-up", type=int, default=200, metavar="COUNT")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--skip", type=int, default=0, help="requests passed over first")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.3, help="memory, of all distinct pages")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # an engine is one thread here, as it is simulated
    requests, count = chosen(args), args.engines
    each = pages_for(requests, args.share, count)
    about = provenance(["attnd", "numpy", "torch"])
    if args.trace:
        about["command"] = about["command"].replace(str(args.trace), args.trace.name)
    if args.calibrate:
        costs = calibrate(requests, each * count)
        write_results(CALIBRATION, about | costs.document())
        return
    rows = []
    with services(1, each * count) as servers:
        rows.append(measure("one", servers, requests, WORKERS * count))
    with services(count, each) as servers:
        rows.append(measure("separate", servers, requests, WORKERS))
    with cluster(count, each) as servers:
        rows.append(measure("cluster", servers, requests, WORKERS * count))
    told = compared(rows)
    print(told)
    if args.write:
        sizes = {"engines": count, "skip": args.skip, "requests": len(requests)}
        sizes |= {"pages_each": each, "cores": len(os.sched_getaffinity(0))}
        write_results(CLUSTER_RESULTS, about | sizes | {"rows": rows} | told)


if __name__ == "__main__":
    main()
