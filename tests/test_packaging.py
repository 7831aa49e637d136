"""What surrounds the service: image, compose, scrape config and dashboard agree with the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from config.settings import load_settings
from service.extras import EXTRAS, how_to_install
from service.metrics import Metrics
from service.supervisor import GRACE_S

ROOT: Final = Path(__file__).resolve().parents[1]
OF_ANOTHER_MAKE: Final = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
"""What `make test` would hand on to a make of a test."""
GRAFANA: Final = ROOT / "config/grafana"
DESIGNED: Final = (
    *("requests_total", "request_duration_seconds", "queue_duration_seconds"),
    *("stage_duration_seconds", "batch_rows", "tokens_appended_total", "kv_pages"),
    *("kv_cache_usage_ratio", "sequences", "prefix_nodes", "kv_bytes_read_total"),
    *("kv_bytes_saved_total", "cascade_batches_total", "out_of_pages_total", "rejected_total"),
    *("inflight", "build_info", "sessions", "slices_total", "waiting"),
    *("engine_up", "engine_kv_pages", "engine_sequences", "engine_queue_seconds"),
    *("engine_calls_total", "engine_moved_total", "engine_not_moved", "process_restarts_total"),
)
UNITS: Final = {
    "short",
    "none",
    "s",
    "reqps",
    "ops",
    "percentunit",
    "bytes",
    "Bps",
}


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def dashboard() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((GRAFANA / "dashboards/attnd.json").read_text("utf-8"))
    return parsed


def panels() -> Iterator[dict[str, Any]]:
    """The dashboard's panels with something to show."""
    return (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def queries() -> Iterator[tuple[str, str]]:
    """(panel title, PromQL) of every target."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def series() -> dict[str, set[str]]:
    """The names a scrape can have, by metric."""
    text = Metrics().render()[0].decode()
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found[name] = {name + suffix for suffix in suffixes}
    return found


def test_every_query_of_the_dashboard_names_only_metrics_that_exist() -> None:
    known = set().union(*series().values())
    for title, expression in queries():
        named = set(re.findall(r"\b((?:attnd|process|python)_\w+)", expression))
        assert named, f"{title}: {expression} names no metric"
        assert named <= known, f"{title}: unknown {sorted(named - known)} in {expression}"


@pytest.mark.parametrize("metric", [f"attnd_{name}" for name in DESIGNED])
def test_every_metric_exists_and_is_on_the_dashboard(metric: str) -> None:
    names = series().get(metric)
    assert names, f"{metric} is not rendered; there are {sorted(series())}"
    shown = " ".join(expression for _, expression in queries())
    assert any(re.search(rf"\b{name}\b", shown) for name in names), f"no panel shows {metric}"


def test_brackets_of_every_query_close() -> None:
    closing = {")": "(", "]": "[", "}": "{"}
    for title, expression in queries():
        left: list[str] = []
        for sign in re.sub(r'"[^"]*"', "", expression):
            if sign in closing.values():
                left.append(sign)
            elif sign in closing:
                assert left and left.pop() == closing[sign], f"{title}: {expression}"
        assert not left, f"{title}: {left} stays open in {expression}"


def test_counters_are_read_as_rates_and_histograms_by_le() -> None:
    for title, expression in queries():
        for total in re.findall(r"\w+_total\b", expression):
            assert f"rate({total}{{" in expression, f"{title}: {total} without rate()"
        if "histogram_quantile" in expression:
            assert "by (le" in expression, f"{title}: a quantile needs le: {expression}"


def test_every_panel_has_a_title_a_description_a_known_unit_and_the_datasource() -> None:
    source = read_yaml("config/grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    for panel in panels():
        case = panel["title"]
        assert panel["description"], case
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, case
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": source["type"], "uid": source["uid"]}, case


def test_units_follow_from_what_is_measured() -> None:
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            text = target["expr"]
            case = f"{panel['title']}: {unit} for {text}"
            if "histogram_quantile" in text and "seconds_bucket" in text:
                assert unit == "s", case
            if "_ratio" in text:
                assert unit == "percentunit", case
            if "requests_total" in text:
                assert unit == "reqps", case
            if "bytes" in text:
                assert unit in ("Bps", "bytes", "percentunit"), case


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: dict[tuple[int, int], str] = {}
    for panel in every:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                other = taken.setdefault((x, y), panel["title"])
                assert other == panel["title"], f"{panel['title']} lies over {other}"


def test_the_dashboard_is_where_compose_and_the_provider_look_for_it() -> None:
    provider = read_yaml("config/grafana/provisioning/dashboards/attnd.yml")["providers"][0]
    grafana = read_yaml("docker-compose.yml")["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts["./config/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["./config/grafana/dashboards"] == provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (GRAFANA / "dashboards" / home.name).is_file()


def test_prometheus_scrapes_every_attnd_of_compose() -> None:
    services = read_yaml("docker-compose.yml")["services"]
    ours = {name for name, service in services.items() if service["image"].startswith("attnd:")}
    job = read_yaml("config/prometheus.yml")["scrape_configs"][0]
    found = job["dns_sd_configs"][0]
    assert set(found["names"]) == ours == {"attnd", "attnd-gpu", "attnd-cluster"}
    assert found["port"] == 8080
    assert job["job_name"] == "attnd", "the dashboard's queries select job=attnd"


def test_compose_starts_a_gpu_only_when_asked_and_mounts_only_what_is_there() -> None:
    compose = read_yaml("docker-compose.yml")
    services = compose["services"]
    profiles = {name: one["profiles"] for name, one in services.items() if "profiles" in one}
    assert profiles == {"attnd-gpu": ["gpu"], "attnd-cluster": ["cluster"]}
    assert services["attnd-gpu"]["build"]["args"]["EXTRA"] == "cuda"
    for name, service in services.items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            there = (ROOT / source).exists() if source[0] == "." else source in compose["volumes"]
            assert there, f"{name} mounts {source}, which is not there"


@pytest.mark.parametrize("name", ["attnd", "attnd-gpu", "attnd-cluster"])
def test_compose_gives_the_service_settings_that_exist_and_time_to_drain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = read_yaml("docker-compose.yml")["services"][name]
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value)
    settings = load_settings([])
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace > settings.server.drain_timeout_s + GRACE_S


@pytest.mark.parametrize("name", ["attnd", "attnd-gpu", "attnd-cluster"])
def test_compose_without_keys_says_that_it_is_meant_and_with_keys_closes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = read_yaml("docker-compose.yml")["services"][name]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    laid_over = read_yaml("docker-compose.keys.yml")["services"][name]
    for environment, is_open in ((service["environment"], True), (laid_over["environment"], False)):
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        auth = load_settings([]).auth
        assert (auth.open, auth.keys_file is None) == (is_open, is_open)
    mounted = laid_over["volumes"][0].rsplit(":", 2)[1]
    assert str(auth.keys_file).startswith(f"{mounted}/")


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest of it) of the Dockerfile, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def test_the_image_is_slim_staged_unprivileged_and_stops_on_sigterm() -> None:
    found = instructions()
    bases = [rest for name, rest in found if name == "FROM"]
    assert ("ARG", "BASE=python:3.11-slim") in found, "the Python that deploy/locked is for"
    assert bases == ["${BASE} AS build", "${BASE}"]
    last = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    settings = dict(last)
    uid, gid = settings["USER"].split(":")
    assert int(uid) > 0 and int(gid) > 0, "runAsNonRoot takes numbers only"
    assert settings["STOPSIGNAL"] == "SIGTERM"
    assert settings["VOLUME"] == "/home/attnd/.cache"
    assert json.loads(settings["ENTRYPOINT"]) == ["attnd", "serve"]
    after_user = [name for name, _ in last[[name for name, _ in last].index("USER") :]]
    assert "COPY" not in after_user, "what is installed belongs to root"


def test_the_image_listens_where_its_health_check_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(instructions())
    for key, value in re.findall(r"(ATTND_\w+)=(\S+)", settings["ENV"]):
        monkeypatch.setenv(key, value)
    server = load_settings([]).server
    check = settings["HEALTHCHECK"]
    assert server.host == "0.0.0.0"
    assert settings["EXPOSE"] == str(server.port)
    assert f"http://127.0.0.1:{server.port}/health/ready" in check
    compile(json.loads(check[check.index("[") :])[2], "HEALTHCHECK", "exec")


def test_one_build_argument_chooses_an_extra_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {"cpu", "cuda", "cuda12", "dev", "examples"} <= set(extras)
    assert extras["cpu"] == []
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "--require-hashes" in dockerfile
    for name, service in read_yaml("docker-compose.yml")["services"].items():
        if "build" in service:
            assert service["build"]["args"]["EXTRA"] in extras, name


def test_a_missing_extra_is_named_by_packages_that_an_index_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, packages in EXTRAS.items():
        wanted = project["optional-dependencies"][extra]
        assert [re.split("[<>=]", one)[0] for one in wanted] == list(packages), extra
        remedy = how_to_install(extra)
        assert f"'.[{extra}]'" in remedy and all(name in remedy for name in packages)
        assert "attnd[" not in remedy, "no index has attnd"


def test_what_the_image_is_built_from_is_let_through_to_the_build() -> None:
    let_through = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert let_through >= {"pyproject.toml", "setup.py", "deploy/locked", "client/src"}
    assert let_through >= {"service", "kernels", "config"}
    for name in let_through:
        assert (ROOT / name).exists(), f"{name} is not there"


def test_the_cpu_set_up_pins_torch() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch==2.13.0" in pins


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a file of deploy/locked."""
    text = (ROOT / f"deploy/locked/{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text, "a host does not belong there"
    found = {}
    for entry in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines():
        pin, *hashes = entry.split()
        package, _, version = pin.partition("==")
        found[package] = version, hashes
    return found


LOCKED: Final = ("base", "cuda", "cuda12", "grpc", "zmq", "otel", "ray")


@pytest.mark.parametrize("name", LOCKED)
def test_every_package_of_the_image_has_a_version_and_hashes(name: str) -> None:
    entries = locked(name)
    assert entries
    for package, (version, hashes) in entries.items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*(\+cpu)?", version), f"{package}: {version}"
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), package


def test_the_image_has_every_dependency_in_the_version_of_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"base": project["dependencies"], **project["optional-dependencies"]}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for name in LOCKED:
        entries = {**locked("base"), **locked(name)}
        for requirement in wanted[name]:
            package = re.split(r"[^\w-]", requirement)[0].replace("_", "-")
            assert package in entries, f"{name}: {package}: run make lock"
            version = entries[package][0].removesuffix("+cpu")
            assert version == pins.get(package, version), f"{package}: run make lock"


def test_extras_of_one_image_agree_on_every_version() -> None:
    for package in set().union(*map(locked, LOCKED)):
        one = {file[package][0] for name in LOCKED if package in (file := locked(name))}
        cuda = {"cuda", "cuda12"} & {name for name in LOCKED if package in locked(name)}
        assert len(one) == 1 or cuda, f"{package}: {one}"


def make_run(folder: Path, pip: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make run` with a Python that runs `pip` in pip's place, and prints its other arguments."""
    (folder / "bin").mkdir()
    stand_in = folder / "bin/python"
    stand_in.write_text(f'#!/bin/sh\ncase "$*" in *pip*) {pip};; *) echo "$*";; esac\n')
    stand_in.chmod(0o755)
    return subprocess.run(
        ["make", "--no-print-directory", "run", f"VENV={folder}", *arguments],
        cwd=ROOT,
        env={**os.environ, "ARGS": "--log.level debug"} | dict.fromkeys(OF_ANOTHER_MAKE, ""),
        capture_output=True,
        text=True,
    )


def test_make_run_shows_large_downloads_and_none_of_pips_other_lines(tmp_path: Path) -> None:
    pip = 'echo "Collecting torch"; echo "  Downloading torch-2.whl (190.1 MB)"'
    done = make_run(tmp_path, pip, "EXTRA=cpu")
    _, *lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines == ["  downloading torch-2.whl, 190.1 MB", "-m service --log.level debug"]


def test_make_run_shows_what_pip_said_when_it_fails(tmp_path: Path) -> None:
    done = make_run(tmp_path, 'echo "ERROR: No matching distribution"; exit 1', "EXTRA=cpu")
    assert done.returncode != 0
    assert "ERROR: No matching distribution" in done.stderr
    assert "-m service" not in done.stdout


def test_make_run_takes_several_extras(tmp_path: Path) -> None:
    done = make_run(tmp_path, 'echo "Downloading $* (1.0 MB)"', "EXTRA=cpu,grpc")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "install.log").read_text(encoding="utf-8")
    assert "-e .[cpu,grpc]" in log


def test_ci_runs_the_tests_the_linters_the_types_and_the_arrows() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script, "a step that fails must fail the run"
    for step in ("make test", "make lint", "make types", "make arrows"):
        assert re.search(rf"^{step}$", script, re.MULTILINE), f".ci/run lacks {step}"


def test_the_manifest_for_kuberay_has_settings_that_exist_and_doors_where_they_are_looked_for() -> (
    None
):
    documents = list(yaml.safe_load_all((ROOT / "deploy/rayservice.yaml").read_text("utf-8")))
    service, front, _ = documents
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    given = [text for name, value in application["args"].items() for text in (f"--{name}", value)]
    settings = load_settings(given)
    assert application["import_path"] == "service.cluster.ray.app:build"
    assert front["spec"]["ports"][0]["targetPort"] == settings.server.port
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert settings.cluster.ingress_resource is not None
    assert settings.cluster.ingress_resource in head["rayStartParams"]["resources"]
    labels = head["template"]["metadata"]["labels"]
    assert front["spec"]["selector"].items() <= labels.items()
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["maxReplicas"] == settings.cluster.max_engines
    pod = workers["template"]["spec"]
    grace = settings.cluster.drain_s + settings.server.drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] > grace
    for spec in (head["template"]["spec"], pod):
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert settings.cluster.secret_file == f"{mounts['secret']}/secret"
