"""A trace replayed on one service, on separate ones with a perfect split, and on a cluster.

    python -m bench.cluster [--trace FILE] [--engines 2] [--requests 600] [--rounds 3] [--quick]

FILE has the format of Mooncake's published traces; without it, requests are generated. So that CPU
engines can follow, a block of 512 tokens becomes a page of 16, a prompt is cut to its first 64
blocks, and a request decodes four tokens. The last requests of the trace are replayed, on pools
that hold a share of their distinct pages. Every service has one door, every engine one thread, and
all run all the time; measurements take turns, and the table has the median of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from attnd import AsyncClient, Client

from bench.cases.trace import TraceRequest, num_distinct, shortened, split, trace_of
from bench.driver.replay import POOL, ReplayResult, replay
from bench.driver.servers import Server, attnd
from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import markdown, with_stamp

CLUSTER_RESULTS: Final = RESULTS / "cluster-cpu.json"
LONGEST: Final = 64
"""Blocks of a prompt that are replayed."""
WORKERS: Final = 4
"""Concurrent requests for each engine."""
WARM_UP: Final = 60
"""Earlier requests, replayed before the first round."""
SMALL_CALLS: Final = 3000
CALLERS: Final = 32
IN_TURN: Final = 500
"""Small calls to each of two services, alternately."""
NAMES: Final = {
    "one": "one service",
    "separate": "two services, perfect split",
    "cluster": "the cluster",
}
FIGURES: Final = {
    "requests_per_s": "requests a second",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "hit_rate": "token hit rate",
}
REQUIRED: Final = (
    ("throughput beside separate services", "throughput_of_separate", ".3f", "at least 0.9"),
    ("token hit rate beside one engine", "hit_rate_of_one", ".3f", "at least 0.95"),
    ("calls a second through one door", "calls_routed_per_s", ",.0f", "at least 1,500"),
    ("added to a small call, p50 ms", "added_ms", "+.2f", "at most 1"),
)


def options(num_pages: int) -> list[str]:
    """Options of a service with `num_pages` pages for each engine."""
    pool = POOL | {"num-pages": num_pages}
    words = [word for name, value in pool.items() for word in (f"--pool.{name}", str(value))]
    return [*words, "--log.level", "warning", "--server.deadline-s", "300"]


async def small_calls(server: Server) -> float:
    """`get_sequence` calls a second by CALLERS tasks of one client."""
    left = iter(range(SMALL_CALLS))
    async with AsyncClient(server.url) as client:
        name = (await client.create_sequence()).id

        async def call() -> None:
            for _ in left:
                await client.get_sequence(name)

        begun = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(CALLERS)))
        rate = SMALL_CALLS / (time.perf_counter() - begun)
        await client.delete_sequence(name)
    return rate


@dataclass(slots=True)
class Setup:
    """Services that the trace is replayed on, and the figures of each round."""

    name: str
    servers: Sequence[Server]
    workers: int
    rounds: list[dict[str, float]] = field(default_factory=list)

    def replay(self, requests: Sequence[TraceRequest]) -> ReplayResult:
        """The requests on empty caches, split perfectly over the servers."""
        for server in self.servers:
            with Client(server.url) as client:
                client.clear()
        shares = split(requests, len(self.servers))
        targets = [(one.url, share) for one, share in zip(self.servers, shares, strict=True)]
        return asyncio.run(replay(targets, self.workers))

    def measure(self, requests: Sequence[TraceRequest]) -> None:
        """One round."""
        figures = self.replay(requests).summary()
        figures["small_per_s"] = round(asyncio.run(small_calls(self.servers[0])), 1)
        self.rounds.append(figures)
        print(self.name, figures, flush=True)

    def row(self) -> dict[str, Any]:
        """Medians of the rounds; `spread` is their range as a share of the median."""
        every = {name: [figures[name] for figures in self.rounds] for name in self.rounds[0]}
        row: dict[str, Any] = {name: median(values) for name, values in every.items()}
        row["spread"] = {
            name: round((max(values) - min(values)) / max(1e-9, row[name]), 3)
            for name, values in every.items()
        }
        return {"name": self.name} | row | {"rounds": self.rounds}


@contextmanager
def started(engines: int, num_pages: int) -> Iterator[list[Setup]]:
    """One service with all pages, a service for each engine, and a cluster of them."""
    with ExitStack() as stack:

        def start(pages: int, *more: str) -> Server:
            return stack.enter_context(attnd(*options(pages), *more))

        yield [
            Setup("one", [start(engines * num_pages)], engines * WORKERS),
            Setup("separate", [start(num_pages) for _ in range(engines)], WORKERS),
            Setup(
                "cluster", [start(num_pages, "--cluster.engines", str(engines))], engines * WORKERS
            ),
        ]


def in_turn(servers: Sequence[Server]) -> list[float]:
    """The median milliseconds of a small call to each server; calls alternate."""
    spent: list[list[float]] = [[] for _ in servers]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url)) for server in servers]
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
    """Throughput beside separate services, hit rate beside one, and time added to a call."""
    one, separate, cluster = rows
    alone, through = (median(times) for times in zip(*calls, strict=True))
    return {
        "throughput_of_separate": round(cluster["requests_per_s"] / separate["requests_per_s"], 3),
        "hit_rate_of_one": round(cluster["hit_rate"] / max(1e-9, one["hit_rate"]), 3),
        "calls_routed_per_s": cluster["small_per_s"],
        "call_ms": [round(alone, 3), round(through, 3)],
        "added_ms": round(median(b - a for a, b in calls), 3),
    }


def pages_for(requests: Sequence[TraceRequest], share: float, engines: int) -> int:
    """Pages of each engine: a share of the distinct pages, and room for the longest prompts."""
    longest = max(len(request.blocks) for request in requests)
    return max(int(share * num_distinct(requests)) // engines, 2 * WORKERS * (longest + 1))


def measure(
    setups: Sequence[Setup],
    requests: Sequence[TraceRequest],
    earlier: Sequence[TraceRequest],
    rounds: int,
) -> list[list[float]]:
    """Rounds of all setups, after a warm-up; returns the times of small calls by `in_turn`."""
    _, separate, cluster = setups
    pair = (separate.servers[0], cluster.servers[0])
    calls = []
    for setup in setups:
        setup.replay(earlier)
    for _ in range(rounds):
        for setup in setups:
            setup.measure(requests)
        calls.append(in_turn(pair))
    return calls


def table(results: Results) -> str:
    """The replays, and the cluster's figures beside the required ones."""
    rows = [
        [
            NAMES[row["name"]],
            *(f"{row[figure]:g} ± {row['spread'][figure] / 2:.0%}" for figure in FIGURES),
            f"{row['small_per_s']:,.0f}",
        ]
        for row in results["rows"]
    ]
    head = ["replayed on", *FIGURES.values(), "small calls a second"]
    alone, through = results["call_ms"]
    required = [(what, format(results[name], form), limit) for what, name, form, limit in REQUIRED]
    second = markdown(["the cluster", "measured", "required"], required)
    note = (
        f"medians of {len(results['rows'][0]['rounds'])} rounds, ± half their range. A small call "
        f"took {alone:.2f} ms through a service's door and {through:.2f} ms through the cluster's. "
        f"{results['requests']} requests, pools of {results['pages_each']:,} pages each, together "
        f"{results['share']:.0%} of the distinct pages"
    )
    return with_stamp(f"{markdown(head, rows)}\n\n{second}", results, note)


def main() -> None:
    parser = command_line(__doc__ or "", trace=True)
    parser.add_argument("--requests", type=int, default=600, help="number of replayed requests")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.3, help="pages, of all distinct ones")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if min(chosen.requests, chosen.engines, chosen.rounds) < 1:
        parser.error("--requests, --engines and --rounds must be at least 1")
    if chosen.quick:
        chosen.requests, chosen.rounds = min(chosen.requests, 60), 1
    os.environ["OMP_NUM_THREADS"] = "1"  # an engine is one thread
    replayed = shortened(trace_of(chosen.trace, 1000), LONGEST)
    earlier, requests = replayed[: -chosen.requests], replayed[-chosen.requests :]
    each = pages_for(requests, chosen.share, chosen.engines)
    stamp = provenance(["attnd", "numpy", "torch"])
    with started(chosen.engines, each) as setups:
        calls = measure(setups, requests, earlier[-WARM_UP:], chosen.rounds)
    rows = [setup.row() for setup in setups]
    sizes = {"engines": chosen.engines, "requests": len(requests), "pages_each": each}
    sizes |= {"share": chosen.share, "cores": len(os.sched_getaffinity(0))}
    results = stamp | sizes | {"rows": rows} | compared(rows, calls)
    publish(results, table(results), CLUSTER_RESULTS, chosen)


if __name__ == "__main__":
    main()
