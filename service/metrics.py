"""Measurements of the service: the only importer of prometheus_client.

Every process counts in its own cells (`service/processes/cells.py`), and any process renders the
sum, so `/metrics` shows one service whichever door answers. Names carry the prefix `attnd_` and
base units. An event adds to a few cells, found in a dict by the metric's name and labels: counting
one attention call takes some microseconds.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.processes.cells import Cells, Key, RemoteCounts, add_block, as_reported

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
ROWS: Final = tuple(float(4**power) for power in range(9))
STAGES: Final = ("plan", "copy_in", "kernel", "copy_out", "encode")

Mode = Literal["flat", "cascade", "explicit"]
REASONS: Final = ("overloaded", "not_ready", "deadline_exceeded", "cancelled")
STATES: Final = ("free", "referenced", "cached", "pinned")
MISSES: Final = (
    *("never_stored", "evicted", "other_salt", "other_model"),
    *("corrupt", "unreadable"),
)
TIERS: Final = ("host", "disk")
MOST_ENGINES: Final = 512
"""A process's cells have room for the series of this many engines."""


@dataclass(frozen=True, slots=True)
class Spec:
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; one more bucket has none."""
    values: tuple[str, ...] = ()
    """Values of its only label whose series exist from the start."""

    @property
    def size(self) -> int:
        """Cells of one series: a value, or a histogram's counts by bucket and its sum."""
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


SPECS: Final[dict[str, Spec]] = {
    "requests": Spec("counter", "Requests with a response.", ("op", "code")),
    "request_duration_seconds": Spec(
        "histogram", "Time from a request's arrival to its encoded response.", ("op",), SECONDS
    ),
    "queue_duration_seconds": Spec(
        "histogram", "Time an operation waited for its turn.", (), SECONDS
    ),
    "stage_duration_seconds": Spec(
        "histogram", "Time of one stage of an operation.", ("stage",), SECONDS, STAGES
    ),
    "batch_rows": Spec("histogram", "Query rows of one attention launch.", (), ROWS),
    "slices": Spec("counter", "Slices that long operations were cut into."),
    "tokens_appended": Spec("counter", "Tokens written, counted once per layer."),
    "kv_bytes_read": Spec("counter", "Pool bytes that attention read."),
    "kv_bytes_saved": Spec("counter", "Additional pool bytes that flat attention would read."),
    "cascade_batches": Spec(
        "counter", "Attention operations by mode.", ("mode",), values=get_args(Mode)
    ),
    "out_of_pages": Spec("counter", "Operations rejected for lack of pages."),
    "rejected": Spec("counter", "Operations that did not run.", ("reason",), values=REASONS),
    "slow_passes": Spec(
        "counter",
        "Passes of a loop longer than 0.1 s, by process and longest operation.",
        ("process", "op"),
    ),
    "log_lines_dropped": Spec(
        "counter", "Log lines dropped: standard error was not read, or not writable.", ("process",)
    ),
    "inflight": Spec("gauge", "Operations accepted and not answered."),
    "waiting": Spec("gauge", "Operations accepted whose turn has not come."),
    "sessions": Spec("gauge", "Connections to the engine, doors included."),
    "kv_pages": Spec("gauge", "Pages of the pool.", ("state",), values=STATES),
    "kv_cache_usage_ratio": Spec("gauge", "Referenced pages over all pages."),
    "prefix_tokens": Spec(
        "counter",
        "Tokens of prompts looked up, in whole pages, by hit or miss.",
        ("result",),
        values=("hit", "miss"),
    ),
    "pages_evicted": Spec("counter", "Cached pages evicted."),
    "tier_records": Spec("gauge", "Pages in the tiers below the pool.", ("tier",), values=TIERS),
    "tier_up": Spec("gauge", "1 while a tier below the pool is in use.", ("tier",), values=TIERS),
    "tier_pages_moved": Spec(
        "counter", "Pages moved to (in) or from (out) a tier.", ("tier", "way")
    ),
    "tier_bytes_moved": Spec(
        "counter", "Bytes of pages moved to (in) or from (out) a tier.", ("tier", "way")
    ),
    "tier_seconds": Spec("counter", "Time of these moves.", ("tier", "way")),
    "tier_misses": Spec(
        "counter",
        "Pages at which a prefix ends, by why no tier has them, or why they were not loaded.",
        ("reason",),
        values=MISSES,
    ),
    "leases": Spec("gauge", "Leases that hold cached pages."),
    "sequences": Spec("gauge", "Sequences alive."),
    "prefix_nodes": Spec("gauge", "Nodes of the prefix tree."),
    "engine_kv_pages": Spec(
        "gauge",
        "Pages of a cluster's engine, as last reported to a door.",
        ("door", "engine", "state"),
    ),
    "engine_sequences": Spec("gauge", "Sequences on one engine.", ("door", "engine")),
    "engine_queue_seconds": Spec(
        "gauge", "Running mean of the time that calls wait at one engine.", ("door", "engine")
    ),
    "engine_calls": Spec("counter", "Calls answered by one engine.", ("door", "engine")),
    "engine_moved": Spec(
        "counter", "Sequences migrated from a draining engine.", ("door", "engine")
    ),
    "engine_not_moved": Spec(
        "gauge", "Sequences that could not be migrated at the last attempt.", ("door", "engine")
    ),
    "engine_up": Spec("gauge", "1 while the engine can be called.", ("door", "engine")),
    "process_restarts": Spec("counter", "Restarts of processes.", ("process",)),
    "build_info": Spec(
        "gauge", "Constant 1; the version and backend are its labels.", ("version", "backend")
    ),
}


class Metrics:
    """The metrics of one process, and of all the service's when they are rendered.

    One thread of a process counts.
    """

    def __init__(self, process: str = "main", shared: Mapping[str, int] | None = None) -> None:
        """`shared` has every process's memory by its name; without it this process is alone."""
        self._all = {name: Cells(fd) for name, fd in (shared or {}).items()} or {process: Cells()}
        self._process = process
        self._own = self._all[process]
        self._own.claim()
        for key, cells in self._own.read().items():
            if SPECS[key[0]].kind == "gauge":  # of the process before a restart
                cells[0] = 0.0
        self._blocks: dict[Key, memoryview[float]] = {}
        self._engines: set[str] = set()
        self.remote = RemoteCounts(size_of, is_gauge)
        """Counts that engines of other services report."""
        for name, spec in SPECS.items():
            for labels in [(value,) for value in spec.values] if spec.labels else [()]:
                self._block((name, *labels))
        self._block(("log_lines_dropped", process))
        self._registry = CollectorRegistry()
        self._registry.register(Everything(self))
        PlatformCollector(registry=self._registry)

    def _block(self, key: Key) -> memoryview[float]:
        """The cells of one series: the metric's name, and the values of its labels."""
        block = self._blocks[key] = self._own.block(key, SPECS[key[0]].size)
        return block

    def add(self, amount: float, *key: str) -> None:
        """Count `amount` more: the counter's name, and the values of its labels."""
        (self._blocks.get(key) or self._block(key))[0] += amount

    def set(self, value: float, *key: str) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        (self._blocks.get(key) or self._block(key))[0] = value

    def sample(self, value: float, *key: str) -> None:
        block = self._blocks.get(key) or self._block(key)
        block[bisect_left(SPECS[key[0]].bounds, value)] += 1.0
        block[-1] += value

    def own(self) -> dict[str, list[float]]:
        """This process's counts, for reports to doors of other services."""
        return as_reported(self._own.read())

    def has_process(self, name: str) -> bool:
        """Whether this is one of the service's own processes, whose counts are rendered here."""
        return name in self._all

    def observe(self, op: str, code: str, seconds: float) -> None:
        """A request of operation `op` was answered with `code` ("ok" or an error's code), after
        `seconds` in the service."""
        self.add(1.0, "requests", op, code)
        self.sample(seconds, "request_duration_seconds", op)

    def slow_pass(self, op: str) -> None:
        """A pass of the process's loop took too long; `op` was the longest operation in it."""
        self.add(1.0, "slow_passes", self._process, op)

    def log_lines_dropped(self, total: int) -> None:
        """Log lines dropped since the process began."""
        self.set(total, "log_lines_dropped", self._process)

    def engine(
        self, engine: str, pages: Mapping[str, int], sequences: int, queue_s: float, calls: int
    ) -> None:
        """The state of a cluster's engine; a lost one has no pages. Only the first `MOST_ENGINES`
        engines of a door are counted."""
        labels = (self._process, engine)
        if len(self._engines) < MOST_ENGINES:
            self._engines.add(engine)
        if engine not in self._engines:
            return
        for state, count in pages.items():
            self.set(count, "engine_kv_pages", *labels, state)
        self.set(sequences, "engine_sequences", *labels)
        self.set(queue_s, "engine_queue_seconds", *labels)
        self.add(calls, "engine_calls", *labels)
        self.set(float(any(pages.values())), "engine_up", *labels)

    def moved(self, engine: str, moved: int, stayed: int) -> None:
        """Sequences migrated from an engine since the last call, and sequences that stay: no
        engine has room, or they cannot be migrated."""
        labels = (self._process, engine)
        if engine in self._engines:
            self.add(moved, "engine_moved", *labels)
            self.set(stayed, "engine_not_moved", *labels)

    def render(self) -> tuple[bytes, str]:
        """The exposition text of all processes together, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def processes(self) -> dict[str, int]:
        """The pids of the service's processes that are alive, by name."""
        siblings = os.getppid() if len(self._all) > 1 else None
        pids = {} if siblings is None else {"main": siblings}
        for name, cells in self._all.items():
            if name == self._process or (siblings and parent_of(cells.pid) == siblings):
                pids[name] = cells.pid
        return {name: pid for name, pid in pids.items() if parent_of(pid) is not None}

    def totals(self, names: Collection[str]) -> dict[Key, list[float]]:
        """The blocks of some counters and histograms, added up over processes and engines."""
        found: dict[Key, list[float]] = {}
        blocks: Iterator[Mapping[Key, Sequence[float]]] = chain(
            (cells.read() for cells in self._all.values()), self.remote
        )
        for one in blocks:
            for key, block in one.items():
                if key[0] in names:
                    add_block(found, key, block)
        return found

    def sums(self, alive: Collection[str]) -> dict[Key, list[float]]:
        """Every block, added up over processes; gauges over those alive."""
        found: dict[Key, list[float]] = {}
        for process, cells in self._all.items():
            for key, block in list(cells.read().items()):
                if process in alive or SPECS[key[0]].kind != "gauge":
                    add_block(found, key, block)
        for reported in self.remote:
            for key, counts in reported.items():
                add_block(found, key, counts)
        pages = {key[1]: value[0] for key, value in found.items() if key[0] == "kv_pages"}
        total = sum(pages.values())
        found["kv_cache_usage_ratio",] = [pages.get("referenced", 0.0) / total if total else 0.0]
        return found


def size_of(name: str) -> int:
    """Cells of one series of a metric; 0 for an unknown one."""
    return SPECS[name].size if name in SPECS else 0


def is_gauge(name: str) -> bool:
    return SPECS[name].kind == "gauge"


class Everything(Collector):
    """Gives the sums to prometheus_client at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        alive = self._metrics.processes()
        sums = self._metrics.sums(alive)
        for name, spec in SPECS.items():
            yield family(name, spec, {key[1:]: sums[key] for key in sums if key[0] == name})
        usage: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for process, pid in alive.items():
            for one in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                if one.name not in usage:
                    kind = GaugeMetricFamily if one.type == "gauge" else CounterMetricFamily
                    usage[one.name] = kind(one.name, one.documentation, labels=["process"])
                usage[one.name].add_metric([process], one.samples[0].value)
        yield from usage.values()


def parent_of(pid: int) -> int | None:
    """The pid of a process's parent; None without such a process, or without /proc."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(line.rpartition(")")[2].split()[1])  # the name in front may hold spaces and brackets


def family(name: str, spec: Spec, found: Mapping[Key, list[float]]) -> Metric:
    """One metric with its series, by their labels."""
    if spec.kind == "histogram":
        spread = HistogramMetricFamily(f"attnd_{name}", spec.help, labels=spec.labels)
        bounds = [*map(floatToGoString, spec.bounds), "+Inf"]
        for labels, (*counts, total) in found.items():
            up_to = list(zip(bounds, accumulate(counts), strict=True))
            spread.add_metric(labels, up_to, total)
        return spread
    of_kind = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
    single = of_kind(f"attnd_{name}", spec.help, labels=spec.labels)
    for labels, (value,) in found.items():
        single.add_metric(labels, value)
    return single
