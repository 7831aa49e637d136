"""The page of results is made of the committed results."""

from __future__ import annotations

from bench.report.page import REPORT, report


def test_the_report_shows_the_committed_results() -> None:
    assert REPORT.read_text(encoding="utf-8") == report(), "run python -m bench.report"
