"""Settings: the order of their sources, and one clear line for whatever is wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

import config.settings as settings_module
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
from tests.harness.processes import ROOT, run


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


def test_variables_that_kubernetes_makes_for_a_service_called_attnd_are_let_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ATTND_SERVICE_HOST", "ATTND_SERVICE_PORT_HTTP", "ATTND_PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    assert load_settings() == Settings()


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
    given = ("--auth.keys-file", "keys", "--server.uds", "/run/socket")
    settings = load_settings(given).with_absolute_paths()
    assert settings.auth.keys_file == str(tmp_path / "keys")
    assert settings.server.uds == "/run/socket"
    assert settings.cache == load_settings(given).cache, "settings that are not given stay absent"


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


def test_cupy_gets_no_directory_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda _: "there")
    for mode, is_own in ((0o755, True), (0o777, False)):
        tmp_path.chmod(mode)
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
        settings_module.set_cupy_cache()
        assert (os.environ["CUPY_CACHE_DIR"] == str(tmp_path)) is is_own


@pytest.mark.parametrize("home", ["/proc/missing", "~"])
def test_cupy_is_imported_for_a_user_without_a_home(tmp_path: Path, home: str) -> None:
    pytest.importorskip("cupy")
    script = "from config.settings import set_cupy_cache; set_cupy_cache(); import cupy"
    environment = {**os.environ, "HOME": home, "PYTHONPATH": str(ROOT)}
    environment.pop("CUPY_CACHE_DIR", None)
    run(sys.executable, "-c", script, cwd=tmp_path, env=environment, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "number"),
    [("4GiB", 2**32), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("70000B", 70000), ("7", 7)],
)
def test_bytes_can_have_a_unit_in_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, number: int
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"cache: {{host_bytes: {given}}}")
    assert load_settings(["--cache.host-bytes", given]).cache.host_bytes == number
    assert load_settings(["--config", str(file)]).cache.host_bytes == number
    monkeypatch.setenv("ATTND_CACHE__HOST_BYTES", given)
    assert load_settings().cache.host_bytes == number


def test_an_error_names_the_file_that_it_is_in(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("pool: {num_pages: 123456.5, page_sze: 8}\ncache: {disk_path: /a}")
    with pytest.raises(SettingsError) as caught:
        load_settings(["--config", str(file), "--server.port", "99999"])
    found = str(caught.value).split("; ")
    assert {one.startswith(f"{file}: ") for one in found if "pool" in one} == {True}
    assert next(one for one in found if "server.port" in one).startswith("server.port = ")


def test_the_help_has_no_defaults_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: none)" in text and "(default: None)" not in text and ": ())" not in text
