"""The client's README lists what the clients have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attnd import AsyncClient, Client, Session

README = Path(__file__).resolve().parents[2] / "client" / "README.md"


@pytest.mark.parametrize("made", [Client, AsyncClient, Session])
def test_every_public_method_is_listed(made: type) -> None:
    named = set(re.findall(r"`(\w+)`", README.read_text()))
    methods = {name for name in dir(made) if callable(getattr(made, name))}
    assert {name for name in methods if not name.startswith("_")} <= named


def test_every_listed_method_is_there() -> None:
    text = README.read_text()
    rows = re.findall(r"^\| [^|]+ \| (`.*) \|$", text[: text.index("## A scheduler")], re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed <= {*dir(Client), *dir(AsyncClient), *dir(Session)}
    assert "commit_sequences" in listed
