"""Manifests, the systemd unit and the alert rules agree with the service's settings and metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from config.settings import Settings, load_settings
from service.metrics import SPECS, Metrics
from service.supervisor import GRACE_S

ROOT: Final = Path(__file__).resolve().parents[1]
OWN_USER: Final = 10001
"""The image's."""


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / path).read_text(encoding="utf-8")))


def of_kind(path: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents(path) if one["kind"] == kind)
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod template of the manifests."""
    yield "deployment", of_kind("deploy/kubernetes.yaml", "Deployment")["spec"]["template"]
    cluster = of_kind("deploy/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]
    yield "ray head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield f"ray {group['groupName']}", group["template"]


PODS: Final = dict(pods())
POLICIES: Final = ("deploy/kubernetes.yaml", "deploy/rayservice.yaml")


@pytest.mark.parametrize("name", PODS)
def test_every_pod_runs_as_the_images_user_without_privileges(name: str) -> None:
    spec = PODS[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == OWN_USER
    assert f"USER {OWN_USER}:" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for container in spec["containers"]:
        bounds = container["securityContext"]
        assert bounds["allowPrivilegeEscalation"] is False
        assert bounds["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", PODS)
def test_every_mount_of_a_pod_is_a_volume_of_it(name: str) -> None:
    spec = PODS[name]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def deployed(monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, dict[str, Any]]:
    """The settings of the Deployment's container, with those of the image beneath, and the pod."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for key, value in re.findall(r"\b(ATTND_\w+)=(\S+)", dockerfile):
        if "__" in key and not key.startswith("ATTND_AUTH"):
            monkeypatch.setenv(key, value)
    spec = PODS["deployment"]["spec"]
    (container,) = spec["containers"]
    return load_settings(container["args"]), spec


def test_the_deployment_has_settings_that_exist_and_asks_for_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, spec = deployed(monkeypatch)
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings.auth.keys_file == f"{mounts['keys']}/keys"
    assert not settings.auth.open
    assert settings.server.socket is not None
    assert Path(settings.server.socket).parent == Path(mounts["run"])
    assert {port["containerPort"] for port in container["ports"]} == {settings.server.port}


def test_the_deployment_is_probed_and_has_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, spec = deployed(monkeypatch)
    (container,) = spec["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}
    assert {probe["path"] for probe in probes.values()} == {"/health/live"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    *_, program = container["lifecycle"]["preStop"]["exec"]["command"]
    waits = float(re.findall(r"sleep\((\d+)\)", program)[0])
    needed = waits + settings.server.drain_timeout_s + GRACE_S
    assert spec["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("path", POLICIES)
def test_the_network_policy_covers_every_pod_and_lets_clients_to_http_only(path: str) -> None:
    policy = of_kind(path, "NetworkPolicy")["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    ray = path.endswith("rayservice.yaml")
    templates = [pod for name, pod in PODS.items() if name.startswith("ray") == ray]
    assert templates
    for template in templates:
        assert chosen <= template["metadata"]["labels"].items()
    assert "Ingress" in policy["policyTypes"]
    for rule in policy["ingress"]:
        for peer in rule["from"]:
            labels = peer["podSelector"]["matchLabels"]
            ports = {port["port"] for port in rule.get("ports", ())}
            if labels.items() <= chosen and "namespaceSelector" not in peer:
                continue  # the cluster's own pods
            is_operator = labels.get("app.kubernetes.io/name") == "kuberay-operator"
            assert ports == ({8265, 52365} if is_operator else {8080}), labels


@pytest.mark.parametrize("path", POLICIES)
def test_no_manifest_is_open_to_everybody(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not re.search(r"auth\.open\b", text)
    assert re.search(r"auth\.keys-file", text)


@pytest.mark.parametrize("path", POLICIES)
def test_a_service_leads_to_the_pods_that_have_doors(path: str) -> None:
    service = of_kind(path, "Service")["spec"]
    name = "ray head" if path.endswith("rayservice.yaml") else "deployment"
    assert service["selector"].items() <= PODS[name]["metadata"]["labels"].items()


def unit() -> dict[str, list[str]]:
    """The values of every key of the systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy/attnd.service").read_text(encoding="utf-8").splitlines():
        if re.match(r"[A-Za-z]+=", line):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_systemd_unit_starts_attnd_with_settings_that_exist(tmp_path: Path) -> None:
    found = unit()
    (start,) = found["ExecStart"]
    program, command, *arguments = start.split()
    assert (Path(program).name, command) == ("attnd", "serve")
    config = tmp_path / "attnd.yaml"
    config.write_text("pool: {num_pages: 64}\n")
    given = [str(config) if one == "/etc/attnd/attnd.yaml" else one for one in arguments]
    settings = load_settings(given)
    assert settings.server.socket == f"/run/{found['RuntimeDirectory'][0]}/engine.sock"
    assert float(found["TimeoutStopSec"][0]) > settings.server.drain_timeout_s + GRACE_S


def test_the_systemd_unit_signals_the_supervisor_and_gives_up_on_wrong_settings() -> None:
    found = unit()
    assert found["KillMode"] == ["mixed"], "the supervisor drains the other processes itself"
    assert found["RestartPreventExitStatus"] == ["2"]
    assert found["NoNewPrivileges"] == ["yes"] and found["ProtectSystem"] == ["strict"]
    assert int(found["LimitNOFILE"][0]) >= 2 * load_settings([]).server.max_connections


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(ROOT / "deploy/attnd.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "attnd.service:" in line]
    assert not [line for line in complaints if "not executable" not in line]


def rules() -> list[dict[str, Any]]:
    (found,) = documents("config/prometheus-rules.yml")
    return [rule for group in found["groups"] for rule in group["rules"]]


RULES: Final = {rule["alert"]: rule for rule in rules()}
OF_PROMETHEUS: Final = {"up"}
WORDS: Final = {
    *("sum", "min", "max", "by", "rate", "increase", "histogram_quantile"),
    *("instance", "engine", "process", "op", "le"),
}


def series() -> set[str]:
    """The names that a scrape can have."""
    found = set(OF_PROMETHEUS)
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().render()[0].decode(), re.M):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + end for end in ends}
    return found


def labels_of(metric: str) -> set[str]:
    """The labels that a series of the metric has, those of the scrape among them."""
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
        assert metric in series(), metric
        matchers = dict(re.findall(r'(\w+)(?:=~|!~|!=|=)("[^"]*")', chosen))
        assert matchers["job"] == '"attnd"'
        assert set(matchers) <= labels_of(metric), f"{metric}: {matchers}"
    kept = re.sub(r'\{[^}]*\}|\[[^]]*\]|"[^"]*"', "", text)
    assert set(re.findall(r"[a-z_]{2,}", kept)) <= WORDS | {metric for metric, _ in selected}
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


def test_alert_names_are_used_once() -> None:
    assert len(RULES) == len(rules())


def test_prometheus_loads_the_rules() -> None:
    (config,) = documents("config/prometheus.yml")
    assert config["rule_files"] == ["prometheus-rules.yml"]
    (compose,) = documents("docker-compose.yml")
    mounted = compose["services"]["prometheus"]["volumes"]
    folder = "/etc/prometheus"
    assert f"./config/prometheus-rules.yml:{folder}/prometheus-rules.yml:ro" in mounted


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_accepts_the_rules() -> None:
    path = ROOT / "config/prometheus-rules.yml"
    assert subprocess.run(["promtool", "check", "rules", str(path)]).returncode == 0


def test_grafana_has_no_administrator_with_a_known_password() -> None:
    (compose,) = documents("docker-compose.yml")
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
