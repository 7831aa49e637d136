"""`--retry-failed`: tests that failed beside others run once more, alone.

A test that passes alone is reported as flaky and no longer fails the run; a test that fails twice
does. Only failures of tests are retried: a file that cannot be collected, an error of pytest
itself, an interrupt or an empty selection keeps its exit status.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from typing import Final

import pytest

MAX_RETRIED: Final = 20
"""More failures than this are a defect, not flakes: nothing is retried."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--retry-failed",
        action="store_true",
        help="run failed tests once more, alone; a test that passes then is reported as flaky",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--retry-failed") and not is_worker:
        config.pluginmanager.register(Retry(), "attnd-retry")


class Retry:
    """Collects the failed tests of a run, and runs them again when the run is over."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.is_complete = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_complete = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        yield
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        if not self.is_complete or not 1 <= len(self.failed) <= MAX_RETRIED:
            return
        print(f"\nrunning {len(self.failed)} failed tests once more, alone", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *self.failed]
        if subprocess.run(command, cwd=session.config.rootpath, check=False).returncode == 0:
            for test in self.failed:
                print(f"flaky: passed alone: {test}")
            session.exitstatus = pytest.ExitCode.OK
