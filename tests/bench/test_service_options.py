"""The command line of bench.service."""

from __future__ import annotations

import sys

import pytest

from bench import service


@pytest.mark.parametrize("option", ["--batches", "--sizes"])
def test_numbers_that_cannot_be_measured_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.service", option, "4", "0"])
    with pytest.raises(SystemExit) as ended:
        service.main()
    assert ended.value.code == 2
    assert f"argument {option}: 0: must be 1 or more" in capsys.readouterr().err
