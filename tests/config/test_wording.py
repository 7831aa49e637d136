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
    ("argv", "rule"),
    [
        (["--pool.num-pgaes", "3"], "did you mean --pool.num-pages?"),
        (["--pool.num_pgaes=3"], "did you mean --pool.num-pages?"),
        (["--pol.num-pages", "3"], "did you mean pool?"),
        (["--pool.foo", "3"], "its settings are num-layers, "),
        (["--confg", "x"], "did you mean config?"),
        (["--pool.num-pages", "0"], "pool.num_pages = 0: must be greater than or equal to 1"),
        (["--pool.num-pages", "x"], "pool.num_pages = x: must be an integer"),
        (["--pool.dtype", "f16"], "did you mean fp16?"),
        (["--server.port", "99999"], "must be less than or equal to 65535"),
        (["--server.live", "maybe"], "must be true or false"),
        (["--pool", "3"], "a section, not a setting"),
    ],
)
def test_a_wrong_option_comes_with_its_rule_or_the_one_that_was_meant(
    argv: list[str], rule: str
) -> None:
    assert rule in error_of(argv)


def spelled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`pool.num_pages` = 77 in one of its spellings; the command line."""
    texts = {
        "yaml _": "pool: {num_pages: 77}",
        "yaml -": "pool: {num-pages: 77}",
        "yaml . _": "pool.num_pages: 77",
        "yaml . -": "pool.num-pages: 77\nserver: {port: 1234}",
    }
    match kind:
        case "--_":
            return ["--pool.num_pages", "77"]
        case "--_=":
            return ["--pool.num_pages=77"]
        case "---":
            return ["--pool.num-pages", "77"]
        case "env _":
            monkeypatch.setenv("ATTND_POOL__NUM_PAGES", "77")
            return []
        case "env -":
            monkeypatch.setenv("ATTND_POOL__NUM-PAGES", "77")
            return []
    file = tmp_path / "with_underscores.yaml"
    file.write_text(texts[kind])
    return ["--config", str(file)]


@pytest.mark.parametrize(
    "kind", ["--_", "--_=", "---", "env _", "env -", "yaml _", "yaml -", "yaml . _", "yaml . -"]
)
def test_settings_may_be_spelled_with_dashes_or_underscores(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(spelled(kind, tmp_path, monkeypatch)).pool.num_pages == 77


def test_values_keep_their_underscores() -> None:
    assert load_settings(["--server.uds=/a_b/c_d"]).server.uds == "/a_b/c_d"
    assert load_settings(["--pool.dtype", "fp8_e4m3"]).pool.dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pool: {num_pgaes: 3}", "pool.num_pgaes: unknown setting: did you mean num_pages?"),
        ("pol: {num_pages: 3}", "did you mean pool?"),
        ("pool: {num_pages: 3, num-pages: 4}", "given twice"),
        ("pool.num_pages: 3\npool: {num-pages: 4}", "given twice"),
        ("pool: {num-pages: -4}", "pool.num_pages = -4: must be greater than or equal to 1"),
    ],
)
def test_a_wrong_key_of_a_file_comes_with_the_one_that_was_meant(
    tmp_path: Path, text: str, rule: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert rule in error_of([f"--config={file}"])


def test_a_misspelled_variable_comes_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTND_POOL_NUM_PAGES", "3")
    assert "did you mean ATTND_POOL__NUM_PAGES?" in error_of([])


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
