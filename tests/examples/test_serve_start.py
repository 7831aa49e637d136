"""The start of examples/serve: help at once, and progress while a model loads."""

from __future__ import annotations

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from bench.driver.servers import free_port
from examples.serve.__main__ import arguments
from examples.serve.checks import checked
from examples.serve.progress import stage
from tests.harness.processes import python


def test_help_describes_every_option_without_loading_torch() -> None:
    program = (
        "import runpy, sys; sys.argv = ['serve', '--help']\n"
        "try: runpy.run_module('examples.serve', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    output = python(program)
    assert output.splitlines()[-1] == "0 False"
    for option in ("--port", "--model", "--attnd", "--live", "--pool-tokens", "--max-running"):
        assert option in output


def test_a_stage_that_takes_long_says_so_every_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="no model"), stage("loading the model"):
        time.sleep(2.5)
        raise ValueError("no model")
    assert capsys.readouterr().err.splitlines() == ["loading the model", "loading the model: 2 s"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prompt-tokens", "0"),
        ("--max-running", "0"),
        ("--answer-tokens", "0"),
        ("--pool-tokens", "-1"),
    ],
)
def test_a_number_out_of_range_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", option, value])
    with pytest.raises(SystemExit):
        arguments()
    assert re.search(f"error: .*{option}.* must be", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "{taken}"], "port {taken} of 127.0.0.1: Address already in use"),
        (["--attnd-port", "{taken}"], "another program listens on port {taken}"),
        (["--attnd", "http://127.0.0.1:{free}"], "no engine at"),
        (["--attnd", "http://example.com"], "is another host"),
        (["--model", "{folder}"], "has no model: there is no config.json"),
    ],
)
def test_what_cannot_start_is_found_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        of = {"taken": taken.getsockname()[1], "free": free_port(), "folder": tmp_path}
        given = ["--port", str(free_port()), "--attnd-port", str(free_port()), *options]
        monkeypatch.setattr(sys, "argv", ["serve", *(one.format(**of) for one in given)])
        with pytest.raises(SystemExit) as ended:
            checked(arguments())
        assert says.format(**of) in str(ended.value)
