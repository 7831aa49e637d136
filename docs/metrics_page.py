"""Writes docs/metrics.md, the reference of all metrics, from their families in the code.

python docs/metrics_page.py [--check]   # --check: exit 1 if the page is not current
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pages import write  # noqa: E402
from prometheus_client.core import Metric  # noqa: E402

from service.families import GROUPS, SPECS, Spec  # noqa: E402
from service.metrics import Everything, Metrics  # noqa: E402

PAGE: Final = ROOT / "docs" / "metrics.md"
HEAD: Final = """# Metrics

Every family of `/metrics`, with the question that it answers. [Operations](operations.md#metrics)
says what to watch; `config/` has a dashboard and alerts. `make map` writes this page from the code.

Counters end in `_total`. A histogram has `_bucket` (with the label `le`), `_sum` and `_count`.
Labels have few values, but `namespace`: the 64 namespaces with most pages have their own series,
`other` counts all the others, and a namespace of that name. A namespace's counters begin at 0 when
it gets its own series. In a cluster of more than 64 namespaces `other` also changes by what those
have counted that join it or leave it. With keys the namespace `cluster` is the router's own.
"""
OF_PROCESSES: Final = {
    "process_virtual_memory_bytes": "How much address space is mapped?",
    "process_resident_memory_bytes": "How much memory is used, touched arenas included?",
    "process_start_time_seconds": "When did it start?",
    "process_cpu_seconds_total": "Which process is busy: a door, or the engine?",
    "process_open_fds": "How near is the limit of open files?",
    "process_max_fds": "What is the limit of open files?",
    "python_info": "Which Python runs?",
}
"""Families of the library, and the questions that they answer."""


def lines() -> Iterator[str]:
    for title, group in GROUPS.items():
        yield f"\n## {title}\n"
        for name, spec in group.items():
            suffix = "_total" if spec.kind == "counter" else ""
            yield entry(f"attnd_{name}{suffix}", spec)
    yield "\n## Of every process\n"
    for one in of_the_library():
        name = one.name + ("_total" if one.type == "counter" else "")
        labels = tuple(one.samples[0].labels)
        unit = next((u for u in ("seconds", "bytes", "fds") if u in name), "1")
        kind = "counter" if one.type == "counter" else "gauge"
        asks = OF_PROCESSES[name]
        yield entry(name, Spec(kind, unit, one.documentation, asks, labels))


def of_the_library() -> list[Metric]:
    metrics = Metrics()
    known = {f"attnd_{name}" for name in SPECS}
    found = [one for one in Everything(metrics).collect() if one.name not in known]
    return [*found, *metrics.platform.collect()]


def entry(name: str, spec: Spec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    values = f" ({', '.join(spec.values)})" if spec.values else ""
    facts = f"{spec.kind} of {spec.unit}" + (f" by {labels}{values}" if labels else "")
    item = f"- **`{name}`**: {facts}. {spec.help.removesuffix('.')}. *{spec.asks}*"
    return textwrap.fill(item, 100, subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(write(PAGE, HEAD.rstrip(), lines()))
