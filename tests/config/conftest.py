"""Settings of the machine's environment are none of a test's."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATTND_")]:
        monkeypatch.delenv(name)
