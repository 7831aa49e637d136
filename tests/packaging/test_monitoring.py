"""Dashboard, alerts and the page of metrics have every metric; a real Prometheus reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from attnd import Client, Prefix

from bench.driver.servers import attnd, free_port
from service.families import SPECS
from service.metrics import Metrics
from tests.harness.plain_http import http_client
from tests.harness.waiting import wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
RULES_FILE: Final = ROOT / "config/prometheus-rules.yml"
OF_PROMETHEUS: Final = {"up"}
FUNCTIONS: Final = {
    *("sum", "min", "max", "by", "rate", "increase", "histogram_quantile", "max_over_time"),
    *("instance", "engine", "process", "op", "le", "namespace", "tier", "reason"),
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


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set(re.findall(r"\w+", " ".join(expression for _, expression in queries())))
    missing = [
        metric for metric in SERIES if metric.startswith("attnd") and not SERIES[metric] & shown
    ]
    assert len(SERIES) >= len(SPECS) and not missing, f"no panel shows {missing}"


def test_the_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    text = (ROOT / "config/grafana/dashboards/attnd.json").read_text(encoding="utf-8")
    every = json.loads(text)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for panel in every
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(cells)[0] < 24


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


needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus is not installed: apt-get install prometheus",
)


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    assert subprocess.run(["promtool", "check", "rules", str(RULES_FILE)]).returncode == 0


TIER: Final = 'attnd_tier_up{job="attnd",instance="i",tier="disk"}'
REJECTED: Final = (
    'attnd_namespace_rejected_total{job="attnd",instance="i",namespace="a",reason="%s"}'
)
FIRES: Final[list[tuple[str, str, str, dict[str, str]]]] = [
    ("AttndTierDown", TIER, "1x9 0x9", {"tier": "disk"}),
    ("", TIER, "0x19", {}),  # a service without a disk
    ("AttndNamespaceOutOfPages", REJECTED % "out_of_pages", "0+1x19", {"namespace": "a"}),
    ("", REJECTED % "overloaded", "0+1x19", {}),
]
"""(alert, or none; a series, its values by the minute; the alert's labels)."""


@needs_prometheus
def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    cases = []
    for alert, series, values, labels in FIRES:
        checks = []
        for name in RULES:
            rule, fired = RULES[name], []
            if name == alert:
                known = {"severity": rule["labels"]["severity"], "instance": "i"} | labels
                texts = {
                    key: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: known[found[1]], text)  # noqa: B023
                    for key, text in rule["annotations"].items()
                }
                fired = [{"exp_labels": known, "exp_annotations": texts}]
            checks.append({"eval_time": "18m", "alertname": name, "exp_alerts": fired})
        given = [{"series": series, "values": values}]
        cases.append({"interval": "1m", "input_series": given, "alert_rule_test": checks})
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES_FILE)], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.long
def test_prometheus_scrapes_a_service_and_answers_every_query_of_the_dashboard(
    tmp_path: Path,
) -> None:
    with attnd() as server, scraping(tmp_path, server.port) as prometheus:
        with Client(f"http://127.0.0.1:{server.port}") as client:
            page = client.info().page_size
            client.create_sequence("a", prefix=Prefix(token_ids=list(range(page))))
            client.delete_sequence("a")

        def ask(path: str, **query: str) -> Any:
            reply = prometheus.get(f"/api/v1/{path}", params=query)
            assert reply.status_code == 200, f"{query}: {reply.text}"
            return reply.json()["data"]

        def is_scraped() -> bool:
            made = ask("query", query='attnd_namespace_requests_total{namespace="default"}')
            return bool(made["result"]) and float(made["result"][0]["value"][1]) >= 3

        wait_for(is_scraped, "a scrape that has the requests")
        (target,) = ask("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        stored = set(ask("label/__name__/values"))
        every = {name for names in SERIES.values() for name in names}
        in_use = {name for name in every if series_exist(name)}
        assert in_use <= stored, f"not scraped: {sorted(in_use - stored)}"
        for title, expression in queries():
            text = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
            assert "result" in ask("query", query=text), title
        wait_for(lambda: are_evaluated(ask("rules")), "an evaluation of every rule")
        rules_now = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules_now} == RULES.keys()
        assert [rule["lastError"] for rule in rules_now if rule["health"] != "ok"] == []


def series_exist(name: str) -> bool:
    """Whether a service without tiers, cluster or trouble has such series."""
    family = re.sub(r"^attnd_|_(total|bucket|sum|count)$", "", name)
    spec = SPECS.get(family) or SPECS.get(family := name.removeprefix("attnd_"))
    late = spec is not None and bool(spec.labels) and not spec.values
    return not late or family in ("requests", "build_info", "namespace_requests")


def are_evaluated(state: Any) -> bool:
    every = [rule for group in state["groups"] for rule in group["rules"]]
    return bool(every) and all(rule["health"] != "unknown" for rule in every)


@contextmanager
def scraping(folder: Path, port: int) -> Iterator[httpx.Client]:
    """A Prometheus with this repository's configuration, for one service; a client of it."""
    config = yaml.safe_load((ROOT / "config/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES_FILE)]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"], job["relabel_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    own = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{own}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            with http_client(f"http://127.0.0.1:{own}") as client:
                wait_for(lambda: is_ready(client), "Prometheus")
                yield client
        finally:
            process.terminate()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
