"""The protocol's statistics: calls of each model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from service.doors.oip.models import VERSION, Model
from service.metrics import Metrics

UNCOUNTED: Final = ("queue", "compute_input", "compute_infer", "compute_output")
"""Durations that the protocol's tools expect."""


def statistics(models: Iterable[Model], metrics: Metrics) -> list[dict[str, Any]]:
    """The calls of each model, over all doors: the number of successes, with the time of all
    calls, and the number of errors. Other durations are not counted by model, and are 0."""
    sums = metrics.sums(metrics.processes())
    succeeded: dict[str, int] = {}
    failed: dict[str, int] = {}
    for (metric, *labels), block in sums.items():
        if metric == "requests":
            op, code = labels
            counts = succeeded if code == "ok" else failed
            counts[op] = counts.get(op, 0) + int(block[0])
    found = []
    for model in models:
        count = succeeded.get(model.name, 0)
        seconds = sums.get(("request_duration_seconds", model.name), [0.0])[-1]
        of_all = {
            "success": {"count": count, "ns": round(seconds * 1e9)},
            "fail": {"count": failed.get(model.name, 0), "ns": 0},
            **{duration: {"count": 0, "ns": 0} for duration in UNCOUNTED},
        }
        counts = {"inference_count": count, "execution_count": count}
        found.append({"name": model.name, "version": VERSION, **counts, "inference_stats": of_all})
    return found
