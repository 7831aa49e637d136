"""How often each model was called, in the protocol's statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.doors.oip.models import VERSION, Model
from service.metrics import Metrics


def statistics(models: Iterable[Model], metrics: Metrics) -> list[dict[str, Any]]:
    """The calls of each model, by whichever door: how many succeeded, with the time of all that
    were answered, and how many failed."""
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
        }
        told = {"name": model.name, "version": VERSION, "inference_count": count}
        found.append({**told, "inference_stats": of_all})
    return found
