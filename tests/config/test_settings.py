"""Settings: the order of their sources, and one clear line for whatever is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from config.cluster import ClusterSettings
from config.sections import PATHS, AuthSettings, CacheSettings
from config.server import ServerSettings
from config.settings import (
    DEFAULTS,
    SECTIONS,
    Settings,
    SettingsError,
    load_settings,
    set_environment,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATTND_")]:
        monkeypatch.delenv(name)


def test_the_yaml_of_defaults_and_the_defaults_in_code_are_the_same() -> None:
    reply = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    assert Settings.model_validate(reply) == Settings()
    assert {section: set(values) for section, values in reply.items()} == {
        name: set(section.model_fields) for name, section in SECTIONS.items()
    }


def test_every_setting_says_why_one_would_change_it() -> None:
    for name, section in SECTIONS.items():
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key} has no description"


def test_settings_cross_to_another_process_as_json_and_no_environment_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--server.socket-uids", "1000,1001", "--server.uds", "/run/x", "--log.level=error"]
    settings = load_settings(arguments)
    monkeypatch.setenv("ATTND_LOG__LEVEL", "debug")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings
    assert type(settings) is Settings


def test_users_of_the_engines_socket_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_SERVER__SOCKET_UIDS", "[1000, 1001]")
    assert load_settings().server.socket_uids == (1000, 1001)
    assert load_settings(["--server.socket-uids", "7"]).server.socket_uids == (7,)


def test_command_line_wins_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("pool: {page_size: 2, num_layers: 2, head_dim: 2}\n")
    monkeypatch.setenv("ATTND_POOL__PAGE_SIZE", "3")
    monkeypatch.setenv("ATTND_POOL__NUM_LAYERS", "3")
    pool = load_settings(["--config", str(file), "--pool.page-size", "4"]).pool
    assert (pool.page_size, pool.num_layers, pool.head_dim, pool.num_kv_heads) == (4, 3, 2, 8)


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("server: {port: 1234}\n")
    monkeypatch.setenv("ATTND_CONFIG", str(file))
    assert load_settings().server.port == 1234


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    assert load_settings([f"--config={file}"]).pool == Settings().pool


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pool.num-pages", "0"], "pool.num_pages = 0"),
        (["--pool.head-dim", "many"], "pool.head_dim = many"),
        (["--pool.bogus", "1"], "--pool.bogus"),
        (["--pool.layout", "HDN"], "pool.layout = HDN"),
        (["--pool.dtype", "fp64"], "pool.dtype = fp64"),
        (["--pool.memory-fraction", "1.5"], "pool.memory_fraction = 1.5"),
        (["--pool.num-pages", "8", "--pool.memory-fraction", "0.5"], "pool.memory_fraction"),
        (["--pool.k-scale", "2"], "pool.k_scale = 2.0: only fp8"),
        (["--pool.v-scale", "0.5", "--pool.dtype", "bf16"], "pool.v_scale = 0.5: only fp8"),
        (["--pool.k-scale", "inf", "--pool.dtype", "fp8_e4m3"], "pool.k_scale = inf"),
        (["--pool.num-pages", "2000000000"], "pool.num_pages = 2000000000"),
        (["--backend.kind", "tpu"], "backend.kind = tpu"),
        (["--backend.kind", "cpu", "--backend.device", "1"], "backend.device = 1"),
        (["--server.port", "65536"], "server.port = 65536"),
        (["--server.queue-depth", "0"], "server.queue_depth = 0"),
        (["--server.deadline-s", "0"], "server.deadline_s = 0"),
        (["--server.uds-mode", "rw-"], "server.uds_mode = rw-"),
        (["--server.socket-mode", "4777"], "server.socket_mode = 4777"),
        (["--server.socket-uids", "-1"], "server.socket_uids.0 = -1"),
        (["--server.socket", "/run/a", "--server.uds", "/run/a"], "server.socket = /run/a"),
        (["--server.http-workers", "0"], "server.http_workers = 0"),
        (["--server.max-sessions", "0"], "server.max_sessions = 0"),
        (["--server.max-connections", "0"], "server.max_connections = 0"),
        (["--server.max-header-bytes", "10"], "server.max_header_bytes = 10"),
        (["--server.max-header-count", "0"], "server.max_header_count = 0"),
        (["--server.idle-timeout-s", "0"], "server.idle_timeout_s = 0"),
        (["--server.receive-timeout-s", "nan"], "server.receive_timeout_s = nan"),
        (["--server.max-inflight-bytes", "1048576"], "server.max_inflight_bytes = 1048576"),
        (["--server.max-body-bytes", "2147483648"], "server.max_inflight_bytes = 1073741824"),
        (["--server.max-arena-bytes", "1"], "server.max_arena_bytes = 1"),
        (["--server.max-arena-bytes", "65536"], "server.max_inflight_bytes = 1073741824"),
        (["--engine.slice-ms", "0"], "engine.slice_ms = 0"),
        (["--engine.max-sequences", "0"], "engine.max_sequences = 0"),
        (["--log.level", "loud"], "log.level = loud"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_key(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ATTND_POOL__NUM_PAGES", "-3", "pool.num_pages = -3"),
        ("ATTND_POOL__BOGUS", "1", "ATTND_POOL__BOGUS: unknown"),
        ("ATTND_POOL_NUM_PAGES", "64", "ATTND_POOL_NUM_PAGES: unknown"),
        ("ATTND_BOGUS", "1", "ATTND_BOGUS: unknown"),
        ("ATTND_SERVER__ALLOWED_HOSTS", "a,b", "ATTND_SERVER__ALLOWED_HOSTS = a,b: must be a list"),
        ("ATTND_CLUSTER__MEMBERS", "[", "ATTND_CLUSTER__MEMBERS = [: must be a list in JSON"),
    ],
)
def test_a_wrong_environment_is_one_line_that_names_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_that_kubernetes_makes_for_a_service_called_attnd_are_let_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ATTND_SERVICE_HOST", "ATTND_SERVICE_PORT_HTTP", "ATTND_PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: {bogus: 1}", "pool.bogus: unknown"),
        ("pols: {page_size: 1}", "pols: unknown section"),
        ("pool: {page_size: 0}", "pool.page_size = 0"),
        ("pool: 3", "pool = 3"),
        ("- 1", "not a mapping"),
        ("pool: {", "other.yaml"),
        ("pool:\n  num_pages: 8\n  num_pages: 9\n", "line 3: num_pages: given twice"),
        ("pool: {num_pages: 8}\npool: {num_layers: 2}\n", "line 2: pool: given twice"),
        ("server: {uds_mode: 600}", "server.uds_mode = 600: write it in quotes"),
        ("server: {socket_mode: 0600}", "server.socket_mode = 384: write it in quotes"),
        ("engine: {slice_ms: soon}", "engine.slice_ms = soon"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(["--config", str(file)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml"):
        load_settings(["--config", "/absent.yaml"])


def names_a_file(name: str) -> bool:
    return (
        name in ("uds", "socket", "disk_path") or name.endswith("_file") or name.startswith("tls_")
    )


def test_every_setting_that_names_a_file_can_be_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "server": ServerSettings,
        "auth": AuthSettings,
        "cluster": ClusterSettings,
        "cache": CacheSettings,
    }
    for section, names in PATHS.items():
        assert set(names) == {one for one in sections[section].model_fields if names_a_file(one)}
    monkeypatch.chdir(tmp_path)
    given = ("--auth.keys-file", "keys", "--cluster.secret-file", "/run/secret")
    settings = load_settings(given).with_absolute_paths()
    assert settings.auth.keys_file == str(tmp_path / "keys")
    assert settings.cluster.secret_file == "/run/secret"
    assert settings.server == load_settings(given).server, "settings that are not given stay absent"


def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for reply, left in ((None, "passive"), ("active", "active")):
        monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back afterwards
        monkeypatch.delenv("OMP_WAIT_POLICY")
        if reply is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", reply)
        set_environment("torch")
        assert os.environ["OMP_WAIT_POLICY"] == left, f"from {reply}"
