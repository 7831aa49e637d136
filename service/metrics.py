"""What the service measures: the only importer of prometheus_client, one method per event.

Names carry the prefix `attnd_` and base units. Children of labelled metrics are looked up once and
kept, and what can be read at scrape time (the pool's numbers) is only stored until then: an event
on the hot path costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import (
    GC_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.engine.operations import Timings

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
ROWS: Final = tuple(float(4**power) for power in range(9))
STAGES: Final = ("plan", "copy_in", "kernel", "copy_out", "encode")
REASONS: Final = ("overloaded", "not_ready", "deadline_exceeded", "cancelled")

Reason = Literal["overloaded", "not_ready", "deadline_exceeded", "cancelled"]
Mode = Literal["flat", "cascade", "explicit"]


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """The pool as the engine's worker last saw it; pages and counts."""

    free: int
    referenced: int
    sequences: int
    nodes: int


class PoolCollector(Collector):
    """Gauges made at scrape time from the last `PoolNumbers`."""

    def __init__(self) -> None:
        self.numbers = PoolNumbers(0, 0, 0, 0)

    def collect(self) -> Iterator[Metric]:
        numbers = self.numbers
        total = numbers.free + numbers.referenced
        pages = GaugeMetricFamily("attnd_kv_pages", "Pages of the pool.", labels=["state"])
        pages.add_metric(["free"], numbers.free)
        pages.add_metric(["referenced"], numbers.referenced)
        yield pages
        yield GaugeMetricFamily(
            "attnd_kv_cache_usage_ratio",
            "Referenced pages over all pages.",
            value=numbers.referenced / total if total else 0.0,
        )
        yield GaugeMetricFamily("attnd_sequences", "Sequences alive.", value=numbers.sequences)
        yield GaugeMetricFamily(
            "attnd_prefix_nodes", "Nodes of the prefix tree.", value=numbers.nodes
        )


class Metrics:
    """One registry with all the metrics of a service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_engine()
        self._pool = PoolCollector()
        self.registry.register(self._pool)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(GC_COLLECTOR)

    def _add_requests(self) -> None:
        self._requests = Counter(
            "attnd_requests", "Requests answered.", ["op", "code"], registry=self.registry
        )
        self._duration = Histogram(
            "attnd_request_duration_seconds",
            "From the request's arrival to its encoded answer.",
            ["op"],
            buckets=SECONDS,
            registry=self.registry,
        )
        queue = Histogram(
            "attnd_queue_duration_seconds",
            "Time an operation waited for its turn.",
            buckets=SECONDS,
            registry=self.registry,
        )
        stage = Histogram(
            "attnd_stage_duration_seconds",
            "Time of one stage of an operation.",
            ["stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._queue = queue
        self._stages = [(name, stage.labels(name)) for name in STAGES]
        self._answered: dict[tuple[str, str], tuple[Counter, Histogram]] = {}

    def _add_engine(self) -> None:
        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"attnd_{name}", told, labels, registry=self.registry)

        self._rows = Histogram(
            "attnd_batch_rows",
            "Query rows of one attention launch.",
            buckets=ROWS,
            registry=self.registry,
        )
        self._appended = counter("tokens_appended", "Tokens written, counted once per layer.")
        self._read = counter("kv_bytes_read", "Pool bytes that attention read.")
        self._saved = counter("kv_bytes_saved", "Pool bytes flat attention would read on top.")
        batches = counter("cascade_batches", "Attention operations by how they ran.", "mode")
        self._batches = {mode: batches.labels(mode) for mode in ("flat", "cascade", "explicit")}
        self._out_of_pages = counter("out_of_pages", "Operations refused for want of pages.")
        rejected = counter("rejected", "Operations that did not run.", "reason")
        self._rejected = {reason: rejected.labels(reason) for reason in REASONS}
        self._inflight = Gauge(
            "attnd_inflight", "Operations admitted and not answered.", registry=self.registry
        )
        self._build = Gauge(
            "attnd_build_info",
            "Constant 1; the version and backend are its labels.",
            ["version", "backend"],
            registry=self.registry,
        )

    # From the HTTP side, once per request.

    def observe(self, op: str, code: str, seconds: float, timings: Timings | None) -> None:
        """A request of operation `op` was answered with `code` ("ok" or an error's code).

        `seconds` is its whole time in the service; `timings` None: it never reached the worker.
        """
        key = (op, code)
        children = self._answered.get(key)
        if children is None:
            children = (self._requests.labels(op, code), self._duration.labels(op))
            self._answered[key] = children
        requests, duration = children
        requests.inc()
        duration.observe(seconds)
        if timings is None:
            return
        self._queue.observe(timings.queue)
        for name, stage in self._stages:
            spent = getattr(timings, name)
            if spent > 0.0:
                stage.observe(spent)

    # From the engine.

    def inflight(self, change: int) -> None:
        """Operations were admitted (+) or answered (-)."""
        self._inflight.inc(change)

    def rejected(self, reason: Reason) -> None:
        """An operation was turned away, or dropped before it ran."""
        self._rejected[reason].inc()

    def appended(self, tokens: int) -> None:
        """Tokens were written to one layer."""
        self._appended.inc(tokens)

    def kv_read(self, read_bytes: int, saved_bytes: int, mode: Mode) -> None:
        """One attention operation: what it read, and what flat would have read on top."""
        self._read.inc(read_bytes)
        self._saved.inc(max(saved_bytes, 0))
        self._batches[mode].inc()

    def batch(self, rows: int) -> None:
        """One attention launch of `rows` query rows."""
        self._rows.observe(rows)

    def out_of_pages(self) -> None:
        """The pool could not give the pages an operation needed."""
        self._out_of_pages.inc()

    def pool(self, numbers: PoolNumbers) -> None:
        """The pool after an operation; stored until the next scrape."""
        self._pool.numbers = numbers

    def build(self, version: str, backend: str) -> None:
        """Which build this is; told once the backend is known."""
        self._build.labels(version, backend).set(1)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
