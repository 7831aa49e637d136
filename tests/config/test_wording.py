"""Errors of settings and requests say the value, the rule and the remedy in plain words."""

from __future__ import annotations

import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from config.settings import SECTIONS, SettingsError, load_settings
from service.errors import (
    InvalidRequest,
    LengthMismatch,
    SequenceExists,
    UnknownLease,
    UnknownPage,
    UnknownSequence,
)
from service.operations.schema.spec import validate
from service.operations.step import StepFields
from service.operations.table import OPERATIONS

FIELDS = {operation.name: operation.fields for operation in OPERATIONS} | {"step": StepFields}
A: dict[str, Any] = {"layer": 0, "sequences": ["a"]}
S: dict[str, Any] = {"op": "decode", "layers": [0]}
FOREIGN = re.compile(r"Input|should|valid |pydantic|constrained|Fields\b|\.0{4}|validation")


@pytest.mark.parametrize(
    ("operation", "fields", "field", "rule"),
    [
        ("decode", {**A, "sm_scale": 1e-50}, "sm_scale", "must be greater than or equal to 1e-10"),
        ("decode", {**A, "sm_scale": float("nan")}, "sm_scale", "must be a finite number"),
        ("decode", {**A, "sm_scale": "x"}, "sm_scale", "must be a number, not text"),
        ("decode", {**A, "layer": -1}, "layer", "must be greater than or equal to 0"),
        ("decode", {**A, "layer": 0.5}, "layer", "must be an integer, not a fraction"),
        ("decode", {**A, "layer": True}, "layer", "must be an integer, not true or false"),
        ("decode", {**A, "layer": None}, "layer", "must be an integer, not null"),
        ("decode", {**A, "sequences": "chat"}, "sequences", "must be a list, not text"),
        ("decode", {**A, "sequences": []}, "sequences", "must have at least 1 entry"),
        ("decode", {**A, "sequences": ["a b"]}, "sequences.0", ": 1 to 128 letters"),
        ("decode", {**A, "lse_base": "10"}, "lse_base", "must be 'e' or '2'"),
        ("decode", {**A, "windowleft": 3}, "windowleft", "did you mean window_left?"),
        ("decode", {**A, "window-left": 3}, "window-left", "did you mean window_left?"),
        ("decode", {**A, "cascade": "allways"}, "cascade", "did you mean always?"),
        ("decode", [], "fields", "must be an object, not a list"),
        ("decode", {"layer": 0}, "sequences", "must be given"),
        ("append", {**A, "append_indptr": [0, "1"]}, "append_indptr.1", "not text"),
        ("append", {**A, "append_indptr": [0]}, "append_indptr", "must have at least 2 entries"),
        ("create_sequences", {"sequences": [{"parnt": "b"}]}, "sequences.0.parnt", "mean parent?"),
        ("create_sequences", {"sequences": ["a"]}, "sequences.0", "must be an object, not text"),
        ("create_sequences", {"sequences": [{"ttl_s": -1}]}, "sequences.0.ttl_s", "greater than 0"),
        (
            "step",
            {**S, "window_left": [-5]},
            "window_left.0",
            "must be greater than or equal to -1",
        ),
        ("step", {**S, "window_left": -7}, "window_left", "greater than or equal to -1"),
        ("step", {**S, "op": "decod"}, "op", "did you mean decode?"),
        ("step", {**S, "slots": [{"q": 3}]}, "slots.0.q", "must be a multiple of 64"),
    ],
)
def test_a_wrong_field_is_named_with_its_rule(
    operation: str, fields: Any, field: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(FIELDS[operation], fields)
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert not FOREIGN.search(str(caught.value)), caught.value


@pytest.mark.parametrize("operation", FIELDS)
def test_no_error_of_a_field_is_in_a_librarys_words(operation: str) -> None:
    values = [None, -1, 1.5, "x", [], {}, [None], [{}], {"a": 1}, True, 1e300]
    for name, value in product(FIELDS[operation].model_fields, values):
        try:
            validate(FIELDS[operation], {**A, name: value})
        except InvalidRequest as error:
            assert not FOREIGN.search(error.rule), error


def test_names_of_any_length_are_refused_without_comparing_them_for_long() -> None:
    began = time.process_time()
    for name in ("x" * 2_000_000, "window_lef" * 200_000):
        with pytest.raises(InvalidRequest, match="no such field"):
            validate(FIELDS["decode"], {**A, name: 1})
        with pytest.raises(InvalidRequest):
            validate(FIELDS["decode"], {**A, "cascade": name})
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (UnknownSequence(["a"]), "create it, or check its id"),
        (UnknownLease("l"), "match the prefix"),
        (UnknownPage("0f"), "commit the tokens again"),
        (SequenceExists(["a"]), "delete it first, or create under another id"),
        (LengthMismatch({"a": 3}), "truncate the sequences first"),
    ],
)
def test_an_error_of_state_comes_with_a_remedy(error: Exception, remedy: str) -> None:
    assert remedy in str(error)


def error_of(argv: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv)
    text = str(caught.value)
    assert "\n" not in text and not FOREIGN.search(text), text
    return text


@pytest.mark.parametrize(
    ("argv", "reply"),
    [
        (["--pool.num-pgaes", "3"], "did you mean --pool.num-pages?"),
        (["--pool.num_pgaes=3"], "did you mean --pool.num-pages?"),
        (["--pol.num-pages", "3"], "did you mean pool?"),
        (["--pool.foo", "3"], "its settings are num-layers, "),
        (["--confg", "x"], "did you mean config?"),
        (["--pool.num-pages", "0"], "pool.num_pages = 0: must be greater than or equal to 1"),
        (["--pool.num-pages", "x"], "pool.num_pages = x: must be an integer"),
        (["--cache.host-bytes", "4 Gib"], "or a number with a unit, such as 4GiB"),
        (["--pool.dtype", "f16"], "did you mean fp16?"),
        (["--server.port", "99999"], "must be less than or equal to 65535"),
        (["--server.live", "maybe"], "must be true or false"),
        (["--pool", "3"], "a section, not a setting"),
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
        (["--server.max-header-bytes", "0"], "server.max_header_bytes = 0"),
        (["--server.idle-timeout-s", "0"], "server.idle_timeout_s = 0"),
        (["--server.receive-timeout-s", "nan"], "server.receive_timeout_s = nan"),
        (["--server.max-inflight-bytes", "1048576"], "server.max_inflight_bytes = 1048576"),
        (["--server.max-body-bytes", "2147483648"], "server.max_inflight_bytes = 1073741824"),
        (["--server.max-arena-bytes", "1"], "server.max_arena_bytes = 1"),
        (["--server.max-arena-bytes", "65536"], "server.max_inflight_bytes = 1073741824"),
        (["--engine.slice-ms", "0"], "engine.slice_ms = 0"),
        (["--engine.max-sequences", "0"], "engine.max_sequences = 0"),
        (["--log.level", "loud"], "log.level = loud"),
        (
            ["--cluster.engines", "2", "--server.http-workers", "2"],
            "server.http_workers = 2: a cluster has one router",
        ),
        (["--cluster.members", "tcp:a:1"], "--cluster.members: this setting was removed: several"),
        (["--cluster.listen=a:1"], "--cluster.listen: this setting was removed: several hosts are"),
        (["--cluster.secret-file", "f"], "was removed: each start makes a secret of its own"),
        (["--cluster.lost_after_s", "1"], "was removed: an engine is dead when its process ends"),
        (["--cluster.ingresses", "2"], "was removed: a cluster has one router: run two clusters"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_key_and_its_rule_or_the_one_that_was_meant(
    argv: list[str], reply: str
) -> None:
    assert reply in error_of(argv)


@pytest.mark.parametrize(
    ("argv", "variable", "text"),
    [
        (["--pool.num_pages", "77"], "", ""),
        (["--pool.num_pages=77"], "", ""),
        (["--pool.num-pages", "77"], "", ""),
        ([], "ATTND_POOL__NUM_PAGES", ""),
        ([], "ATTND_POOL__NUM-PAGES", ""),
        ([], "", "pool: {num_pages: 77}"),
        ([], "", "pool: {num-pages: 77}"),
        ([], "", "pool.num_pages: 77"),
        ([], "", "pool.num-pages: 77\nserver: {port: 1234}"),
    ],
)
def test_settings_may_be_spelled_with_dashes_or_underscores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], variable: str, text: str
) -> None:
    file = tmp_path / "with_underscores.yaml"
    file.write_text(text)
    if variable:
        monkeypatch.setenv(variable, "77")
    assert load_settings([*argv, "--config", str(file)]).pool.num_pages == 77


def test_values_keep_their_underscores() -> None:
    assert load_settings(["--server.uds=/a_b/c_d"]).server.uds == "/a_b/c_d"
    assert load_settings(["--pool.dtype", "fp8_e4m3"]).pool.dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("pool: {num_pgaes: 3}", "pool.num_pgaes: unknown setting: did you mean num_pages?"),
        ("pol: {num_pages: 3}", "did you mean pool?"),
        ("pool: {num_pages: 3, num-pages: 4}", "given twice"),
        ("pool.num_pages: 3\npool: {num-pages: 4}", "given twice"),
        ("pool: {num-pages: -4}", "pool.num_pages = -4: must be greater than or equal to 1"),
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
def test_a_wrong_file_is_one_line_with_the_key_and_its_rule_or_the_one_that_was_meant(
    tmp_path: Path, text: str, reply: str
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    assert reply in error_of([f"--config={file}"])


@pytest.mark.parametrize(
    ("name", "value", "reply"),
    [
        ("ATTND_POOL__NUM_PAGES", "-3", "pool.num_pages = -3"),
        ("ATTND_POOL__BOGUS", "1", "ATTND_POOL__BOGUS: unknown"),
        ("ATTND_POOL_NUM_PAGES", "64", "ATTND_POOL_NUM_PAGES: unknown"),
        ("ATTND_POOL_NUM_PAGES", "3", "did you mean ATTND_POOL__NUM_PAGES?"),
        ("ATTND_BOGUS", "1", "ATTND_BOGUS: unknown"),
        ("ATTND_SERVER__ALLOWED_HOSTS", "a,b", "ATTND_SERVER__ALLOWED_HOSTS = a,b: must be a list"),
        ("ATTND_SERVER__ALLOWED_HOSTS", "[", "ATTND_SERVER__ALLOWED_HOSTS = [: must be a list in"),
    ],
)
def test_a_wrong_environment_is_one_line_with_the_key_or_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reply: str
) -> None:
    monkeypatch.setenv(name, value)
    assert reply in error_of([])


def test_help_names_every_setting_and_no_type_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "tuple" not in text and "Annotated" not in text and "Optional" not in text
    assert "--server.socket-uids int,..." in text and "--config" in text and "--version" in text
    for name, section in SECTIONS.items():
        for key in section.model_fields:
            assert f"--{name}.{key.replace('_', '-')}" in text


def test_a_removed_setting_names_its_successor_in_the_environment_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "attnd.yaml"
    for text in ("cluster:\n  ingresses: 2\n", "cluster.ingresses: 2\n"):
        file.write_text(text)
        reply = error_of(["--config", str(file)])
        assert reply.startswith(f"{file}: cluster.ingresses: this setting was removed: a cluster")
    monkeypatch.setenv("ATTND_CLUSTER__MEMBERS", "[]")
    assert error_of([]).startswith("ATTND_CLUSTER__MEMBERS: this setting was removed: several")
