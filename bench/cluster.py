"""A trace replayed on one service, on separate ones with a perfect split, and on a cluster.

    python -m bench.cluster --trace FILE [--engines 2] [--requests 600] [--rounds 3] [--write]
    python -m bench.cluster                # without a trace, on requests that are made up

FILE has the format of Mooncake's published traces. A block of 512 tokens becomes a page of 16, of
a prompt the first 64 are played, and a request decodes four tokens, so that processors without a
GPU can follow. The last requests are played, whose chats come back most, on pools that hold a share
of their distinct pages. Every service has one door, every engine one thread, and all of them run
from beginning to end; what is measured goes round, one after another, and the median of the rounds
counts. What others disturb is measured again.

Printed are throughput and latency of requests, token hit rate, small calls answered a second, and
what a small call takes, asked of one service and of the cluster in turn. Between them requests from
before those are played for the costs that the simulation is fed with.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from attnd import Client

from bench.cases.trace import Request, generated_trace, num_distinct, read_trace, shortened, split
from bench.driver.calibration import CALLERS, Calibration, clear, small_calls, url
from bench.driver.processes import Processes, undisturbed
from bench.driver.replay import POOL, Played, replay
from bench.driver.servers import Server, attnd
from bench.provenance import RESULTS, provenance, write_results

CLUSTER_RESULTS: Final = RESULTS / "cluster-cpu.json"
CALIBRATION: Final = RESULTS / "calls-cpu.json"
LONGEST: Final = 64
"""Blocks of a prompt that are played."""
WORKERS: Final = 4
"""Requests at a time for each engine."""
CALIBRATED_WITH: Final = 60
"""Requests of one piece of the calibration."""
IN_TURN: Final = 500
"""Small calls, one at a time, of each of two services in turn."""
NAMES: Final = ("one", "separate", "cluster")


def options(pages: int) -> list[str]:
    """Of a service whose pool has so many pages for each engine."""
    pool = POOL | {"num-pages": pages}
    told = [part for name, value in pool.items() for part in (f"--pool.{name}", str(value))]
    return [*told, "--log.level", "warning", "--server.deadline-s", "300"]


@dataclass(slots=True)
class Arm:
    """Services that a trace is replayed on, and what came of it round by round."""

    name: str
    servers: Sequence[Server]
    workers: int
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def play(self, requests: Sequence[Request]) -> Played:
        """The requests on empty caches, in a perfect split over the servers."""
        clear(self.servers)
        shares = split(requests, len(self.servers))
        given = [(url(one), share) for one, share in zip(self.servers, shares, strict=True)]
        return asyncio.run(replay(given, self.workers))

    def measure(self, requests: Sequence[Request]) -> None:
        """One round."""
        processes = Processes.of(self.servers)
        played, seen = undisturbed(processes, lambda: self.play(requests))
        rate, small = undisturbed(
            processes, lambda: asyncio.run(small_calls(self.servers[0], CALLERS))
        )
        told: dict[str, Any] = played.summary()
        told |= {"small_per_s": round(rate, 1), "others": max(seen.others, small.others)}
        told["cpu_s"] = [round(one, 2) for one in seen.cpu_s]
        self.rounds.append(told)
        print(self.name, told, flush=True)

    def row(self) -> dict[str, Any]:
        """The median of the rounds; `spread` is how far they lie apart, as a share of it."""
        names = [name for name in self.rounds[0] if name not in ("others", "cpu_s")]
        every = {name: [told[name] for told in self.rounds] for name in names}
        row: dict[str, Any] = {name: median(told) for name, told in every.items()}
        row["spread"] = {
            name: round((max(told) - min(told)) / max(1e-9, row[name]), 3)
            for name, told in every.items()
        }
        return {"name": self.name} | row | {"rounds": self.rounds}


@contextmanager
def arms(count: int, pages: int) -> Iterator[list[Arm]]:
    """One service with all the pages, as many services as engines, and a cluster of them."""
    with ExitStack() as stack:

        def start(each: int, *more: str) -> Server:
            return stack.enter_context(attnd(*options(each), *more))

        one = [start(count * pages)]
        separate = [start(pages) for _ in range(count)]
        whole = [start(pages, "--cluster.engines", str(count))]
        workers = (count * WORKERS, WORKERS, count * WORKERS)
        yield [Arm(*told) for told in zip(NAMES, (one, separate, whole), workers, strict=True)]


def in_turn(servers: Sequence[Server]) -> list[float]:
    """The median milliseconds of a small call of each server, asked one after another."""
    spent: list[list[float]] = [[] for _ in servers]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(url(server))) for server in servers]
        names = [client.create_sequence().id for client in clients]
        for _ in range(IN_TURN):
            for client, name, times in zip(clients, names, spent, strict=True):
                begun = time.perf_counter()
                client.get_sequence(name)
                times.append(1e3 * (time.perf_counter() - begun))
        for client, name in zip(clients, names, strict=True):
            client.delete_sequence(name)
    return [median(times) for times in spent]


def compared(rows: Sequence[dict[str, Any]], calls: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What the cluster is held to: throughput beside separate services, hit rate beside one with
    all the memory, and what a call takes longer."""
    one, separate, whole = rows
    alone, through = (median(told) for told in zip(*calls, strict=True))
    return {
        "throughput_of_separate": round(whole["requests_per_s"] / separate["requests_per_s"], 3),
        "hit_rate_of_one": round(whole["hit_rate"] / max(1e-9, one["hit_rate"]), 3),
        "calls_routed_per_s": whole["small_per_s"],
        "call_ms": [round(alone, 3), round(through, 3)],
        "added_ms": round(median(b - a for a, b in calls), 3),
    }


def pages_for(requests: Sequence[Request], share: float, engines: int) -> int:
    """Of each engine, where all together have that share of the trace's distinct pages, and room
    for the longest prompts."""
    longest = max(len(request.blocks) for request in requests)
    return max(int(share * num_distinct(requests)) // engines, 2 * WORKERS * (longest + 1))


def measure(
    every: Sequence[Arm], requests: Sequence[Request], others: Sequence[Request], rounds: int
) -> tuple[list[list[float]], Calibration]:
    """Rounds of everything; `others` are the requests for the calibration."""
    one, separate, whole = every
    calibration, calls = Calibration(), []
    for arm in every:  # as warm as it will be
        arm.play(others[:CALIBRATED_WITH])
    for number in range(rounds):
        first = number * CALIBRATED_WITH % max(1, len(others) - CALIBRATED_WITH)
        some = others[first : first + CALIBRATED_WITH]
        calibration.piece(one.servers[0], separate.servers, some)
        for arm in every:
            arm.measure(requests)
        pair = (separate.servers[0], whole.servers[0])
        calls.append(undisturbed(Processes.of(pair), lambda pair=pair: in_turn(pair))[0])  # type: ignore[misc]
    return calls, calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--made-up", type=int, default=1000, metavar="COUNT")
    parser.add_argument("--requests", type=int, default=600, help="the last ones are played")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.3, help="memory, of all distinct pages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # an engine is one thread here, as it is simulated
    trace = read_trace(args.trace) if args.trace else generated_trace(args.made_up)
    played = shortened(trace, LONGEST)
    others, requests = played[: -args.requests], played[-args.requests :]
    if len(others) < CALIBRATED_WITH:
        parser.error(f"{len(trace)} requests leave none beside {args.requests} to calibrate with")
    others = others[-args.rounds * CALIBRATED_WITH - 1 :]
    each = pages_for(requests, args.share, args.engines)
    about = provenance(["attnd", "numpy", "torch"])
    if args.trace:
        about["command"] = about["command"].replace(str(args.trace), args.trace.name)
    with arms(args.engines, each) as every:
        calls, calibration = measure(every, requests, others, args.rounds)
    rows = [arm.row() for arm in every]
    told, costs = compared(rows, calls), calibration.costs()
    print(told)
    if args.write:
        sizes = {"engines": args.engines, "requests": len(requests), "pages_each": each}
        sizes |= {"share": args.share, "cores": len(os.sched_getaffinity(0))}
        write_results(CLUSTER_RESULTS, about | sizes | {"rows": rows} | told)
        write_results(CALIBRATION, about | costs.document())


if __name__ == "__main__":
    main()
