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
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Final

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

from service.families import BY_NAMESPACE, SPECS, Spec
from service.namespace_counts import BLOCK, NamespaceCounts, bounded, series_in
from service.processes.cells import Cells, Key, RemoteCounts, add_block, as_reported

MOST_ENGINES: Final = 512
"""A process's cells have room for the series of this many engines."""


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
            if key != BLOCK and SPECS[key[0]].kind == "gauge":  # of the process before a restart
                cells[0] = 0.0
        self._blocks: dict[Key, memoryview[float]] = {}
        self._engines: set[str] = set()
        self.remote = RemoteCounts(size_of, is_gauge)
        """Counts that engines of other services report."""
        for name in SPECS.keys() - BY_NAMESPACE.keys():
            spec = SPECS[name]
            for labels in [(value,) for value in spec.values] if spec.labels else [()]:
                self._block((name, *labels))
        self._block(("log_lines_dropped", process))
        self._registry = CollectorRegistry()
        self._registry.register(Everything(self))
        self.platform = PlatformCollector(registry=self._registry)

    def _block(self, key: Key) -> memoryview[float]:
        """The cells of one series: the metric's name, and the values of its labels."""
        block = self._blocks[key] = self._own.block(key, SPECS[key[0]].size)
        return block

    @cached_property
    def namespaces(self) -> NamespaceCounts:
        """This process's counts by namespace."""
        return NamespaceCounts(self._own)

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
        return as_reported(series_of(self._own))

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
        embedding = None if siblings is None else parent_of(siblings)
        """The process of an embedded engine is that of its doors' supervisor's parent."""
        pids = {} if siblings is None else {"main": siblings}
        for name, cells in self._all.items():
            is_sibling = siblings and parent_of(cells.pid) == siblings
            if name == self._process or is_sibling or cells.pid == embedding:
                pids[name] = cells.pid
        return {name: pid for name, pid in pids.items() if parent_of(pid) is not None}

    def totals(self, names: Collection[str]) -> dict[Key, list[float]]:
        """The blocks of some counters and histograms, but those by namespace, added up over
        processes and engines."""
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
            for key, block in series_of(cells).items():
                if process in alive or SPECS[key[0]].kind != "gauge":
                    add_block(found, key, block)
        for reported in self.remote:
            for key, counts in reported.items():
                add_block(found, key, counts)
        pages = {key[1]: value[0] for key, value in found.items() if key[0] == "kv_pages"}
        total = sum(pages.values())
        found |= bounded({key: found.pop(key) for key in list(found) if key[0] in BY_NAMESPACE})
        found["kv_cache_usage_ratio",] = [pages.get("referenced", 0.0) / total if total else 0.0]
        return found


def series_of(cells: Cells) -> dict[Key, Sequence[float]]:
    """The blocks of a process by family and labels, namespaces included."""
    blocks: dict[Key, Sequence[float]] = dict(cells.read())
    slots = cells.read().get(BLOCK)
    if slots is not None:
        del blocks[BLOCK]
        blocks |= series_in(slots)
    return blocks


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
        found: dict[str, dict[Key, list[float]]] = {name: {} for name in SPECS}
        for (name, *labels), block in self._metrics.sums(alive).items():
            found[name][tuple(labels)] = block
        for name, spec in SPECS.items():
            yield family(name, spec, found[name])
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
