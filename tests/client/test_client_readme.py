"""The client's pages list its methods: METHODS.md, which is generated, has all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from attnd import AsyncClient, Client, Session

CLIENT = Path(__file__).resolve().parents[2] / "client"


@pytest.mark.parametrize("made", [Client, AsyncClient, Session])
def test_every_public_method_is_listed(made: type) -> None:
    listed = set(re.findall(r"^### `(\w+)`", (CLIENT / "METHODS.md").read_text(), re.M))
    methods = {name for name in dir(made) if callable(getattr(made, name))}
    assert {name for name in methods if not name.startswith("_")} <= listed


def test_every_method_in_the_readmes_list_exists() -> None:
    text = (CLIENT / "README.md").read_text()
    methods = text[text.index("- **Sequences**") : text.index("- **One client per process**")]
    named = set(re.findall(r"`(\w+)`", methods))
    assert named <= {*dir(Client), *dir(AsyncClient), *dir(Session)}
    assert "commit_sequences" in named


def test_the_page_of_methods_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, CLIENT / "methods_page.py", "--check"], cwd=CLIENT / "src"
    )
    assert done.returncode == 0, "run `make map`"
