"""Compose files, Kubernetes manifests and the systemd unit agree with the service's settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import pytest
import yaml

from config.settings import Settings, load_settings
from service.supervisor import GRACE_S

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGE_USER: Final = 10001
COMPOSED: Final = ("attnd", "attnd-gpu", "attnd-cluster")


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / path).read_text(encoding="utf-8")))


def composed(file: str, name: str) -> dict[str, Any]:
    """A service of a compose file."""
    found: dict[str, Any] = documents(file)[0]["services"][name]
    return found


@pytest.mark.parametrize("name", [*COMPOSED, "attnd-chat"])
def test_compose_gives_the_service_settings_that_exist_and_time_to_drain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = composed("docker-compose.yml", name)
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value)
    settings = load_settings([])
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace > settings.server.drain_timeout_s + GRACE_S


class Health(BaseHTTPRequestHandler):
    """Answers the paths of health checks with the status `answer`."""

    answer = 200

    def do_GET(self) -> None:
        is_known = self.path in ("/health/ready", "/health")
        self.send_response(self.answer if is_known else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/chat.Dockerfile"])
def test_the_health_check_asks_the_container_itself_whatever_its_proxy(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", "")
    check = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    assert check is not None
    _, *arguments = json.loads(check[1])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        program = re.sub(r"\b80[08]0\b", str(server.server_port), arguments[-1])
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            for answer, status in ((200, 0), (503, 1)):
                monkeypatch.setattr(Health, "answer", answer)
                done = subprocess.run([sys.executable, *arguments[:-1], program], timeout=30)
                assert done.returncode == status
        finally:
            server.shutdown()


@pytest.mark.parametrize("name", COMPOSED)
def test_compose_without_keys_says_that_it_is_meant_and_with_keys_closes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = composed("docker-compose.yml", name)
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    laid_over = composed("docker-compose.keys.yml", name)
    for environment, is_open in ((service["environment"], True), (laid_over["environment"], False)):
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        auth = load_settings([]).auth
        assert (auth.open, auth.keys_file is None) == (is_open, is_open)
    mounted = laid_over["volumes"][0].rsplit(":", 2)[1]
    assert str(auth.keys_file).startswith(f"{mounted}/")


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
    assert spec["securityContext"]["runAsUser"] == IMAGE_USER
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
    """The settings of the Deployment's container, over the image's, and the pod."""
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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(ROOT / "deploy/attnd.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "attnd.service:" in line]
    assert not [line for line in complaints if "not executable" not in line]


def test_the_manifest_for_kuberay_has_settings_that_exist_and_doors_where_they_are_looked_for() -> (
    None
):
    service, front, _ = documents("deploy/rayservice.yaml")
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    given = [text for name, value in application["args"].items() for text in (f"--{name}", value)]
    settings = load_settings(given)
    assert application["import_path"] == "service.cluster.ray.app:build"
    assert front["spec"]["ports"][0]["targetPort"] == settings.server.port
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert settings.cluster.ingress_resource is not None
    assert settings.cluster.ingress_resource in head["rayStartParams"]["resources"]
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["maxReplicas"] == settings.cluster.max_engines
    pod = workers["template"]["spec"]
    grace = settings.cluster.drain_s + settings.server.drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] > grace
    for spec in (head["template"]["spec"], pod):
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert settings.auth.keys_file == f"{mounts['secret']}/keys"
