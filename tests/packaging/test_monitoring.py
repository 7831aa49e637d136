"""Dashboard and alert rules name metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from service.metrics import SPECS, Metrics

ROOT: Final = Path(__file__).resolve().parents[2]
DESIGNED: Final = (
    *("requests_total", "request_duration_seconds", "queue_duration_seconds"),
    *("stage_duration_seconds", "batch_rows", "tokens_appended_total", "kv_pages"),
    *("kv_cache_usage_ratio", "sequences", "prefix_nodes", "kv_bytes_read_total"),
    *("kv_bytes_saved_total", "cascade_batches_total", "out_of_pages_total", "rejected_total"),
    *("inflight", "build_info", "sessions", "slices_total", "waiting"),
    *("engine_up", "engine_kv_pages", "engine_sequences", "engine_queue_seconds"),
    *("engine_calls_total", "engine_moved_total", "engine_not_moved", "process_restarts_total"),
)
RULES_FILE: Final = ROOT / "config/prometheus-rules.yml"
OF_PROMETHEUS: Final = {"up"}
FUNCTIONS: Final = {
    *("sum", "min", "max", "by", "rate", "increase", "histogram_quantile"),
    *("instance", "engine", "process", "op", "le"),
}


def panels() -> Iterator[dict[str, Any]]:
    """The dashboard's panels that show something."""
    text = (ROOT / "config/grafana/dashboards/attnd.json").read_text(encoding="utf-8")
    return (panel for panel in json.loads(text)["panels"] if panel["type"] != "row")


def queries() -> Iterator[tuple[str, str]]:
    """(panel title, PromQL) of every target."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def series() -> dict[str, set[str]]:
    """The names that a scrape can have, by metric."""
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().render()[0].decode(), re.M):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found[name] = {name + suffix for suffix in suffixes}
    return found


SERIES: Final = series()
NAMES: Final = OF_PROMETHEUS.union(*SERIES.values())


def test_every_query_of_the_dashboard_names_only_metrics_that_exist() -> None:
    for title, expression in queries():
        named = set(re.findall(r"\b((?:attnd|process|python)_\w+)", expression))
        assert named, f"{title}: {expression} names no metric"
        assert named <= NAMES, f"{title}: unknown {sorted(named - NAMES)} in {expression}"


@pytest.mark.parametrize("metric", [f"attnd_{name}" for name in DESIGNED])
def test_every_metric_exists_and_is_on_the_dashboard(metric: str) -> None:
    names = SERIES.get(metric)
    assert names, f"{metric} is not rendered; there are {sorted(SERIES)}"
    shown = " ".join(expression for _, expression in queries())
    assert any(re.search(rf"\b{name}\b", shown) for name in names), f"no panel shows {metric}"


def test_counters_are_read_as_rates_and_histograms_by_le() -> None:
    for title, expression in queries():
        for total in re.findall(r"\w+_total\b", expression):
            assert f"rate({total}{{" in expression, f"{title}: {total} without rate()"
        if "histogram_quantile" in expression:
            assert "by (le" in expression, f"{title}: a quantile needs le: {expression}"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


RULES: Final = {rule["alert"]: rule for rule in rules()}


def labels_of(metric: str) -> set[str]:
    """The labels of a series of the metric, including the scrape's."""
    base = {"job", "instance"}
    for name, spec in SPECS.items():
        if re.fullmatch(rf"attnd_{name}(_total|_bucket|_sum|_count)?", metric):
            return base | set(spec.labels) | ({"le"} if metric.endswith("_bucket") else set())
    return base | ({"process"} if metric.startswith("process_") else set())


@pytest.mark.parametrize("alert", RULES)
def test_every_alert_reads_metrics_and_labels_that_exist(alert: str) -> None:
    text = RULES[alert]["expr"]
    selected = re.findall(r"([a-z_]+)\{([^}]*)\}", text)
    assert selected, text
    for metric, chosen in selected:
        assert metric in NAMES, metric
        matchers = dict(re.findall(r'(\w+)(?:=~|!~|!=|=)("[^"]*")', chosen))
        assert matchers["job"] == '"attnd"'
        assert set(matchers) <= labels_of(metric), f"{metric}: {matchers}"
    kept = re.sub(r'\{[^}]*\}|\[[^]]*\]|"[^"]*"', "", text)
    assert set(re.findall(r"[a-z_]{2,}", kept)) <= FUNCTIONS | {metric for metric, _ in selected}
    for group in re.findall(r"by \(([^)]*)\)", text):
        for metric, _ in selected:
            assert {label.strip() for label in group.split(",")} <= labels_of(metric), metric


@pytest.mark.parametrize("alert", RULES)
def test_every_alert_is_formed_as_prometheus_wants_it(alert: str) -> None:
    rule = RULES[alert]
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[A-Z][A-Za-z]+", alert)
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    text = rule["expr"]
    assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
    assert re.search(r"(==|>=|<=|>|<) [0-9.]+$", text), "an alert compares with a number"
    for total in re.findall(r"\w+_total\b", text):
        assert re.search(rf"(rate|increase)\({total}\{{", text), f"{total} without rate()"
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in text or label in labels_of(re.findall(r"([a-z_]+)\{", text)[0])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_accepts_the_rules() -> None:
    assert subprocess.run(["promtool", "check", "rules", str(RULES_FILE)]).returncode == 0
