"""The tutorials run as written and print the output that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest

from bench.driver.servers import attnd
from service.keys import line_of, new_key

pytestmark = pytest.mark.long

PAGES: Final = sorted(Path(__file__).resolve().parents[1].glob("docs/tutorials/*.md"))
TENANTS: Final = {
    "SEARCH_KEY": ("search", ("read", "append")),
    "MAIL_KEY": ("mail", ("read", "append")),
    "ADMIN_KEY": ("ops", ("read", "append", "admin")),
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_the_output_in_its_text(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    keys = {name: new_key() for name in TENANTS}
    path = tmp_path / "keys"
    path.write_text("".join(line_of(keys[name], *TENANTS[name]) + "\n" for name in TENANTS))
    path.chmod(0o600)
    scripts = [block.replace("\\\n", "") for block in blocks(text, "sh")]
    command = next(script for script in scripts if script.startswith("attnd serve"))
    arguments = [str(path) if word == "KEYS" else word for word in shlex.split(command)[2:]]
    names: dict[str, Any] = dict(keys)
    with attnd(*arguments) as server:
        for source in blocks(text, "python"):
            here = source.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
            here = here.replace("Session(port=8080)", f"Session({server.socket!r})")
            exec(compile(here, page.name, "exec"), names)
    assert capsys.readouterr().out == "".join(blocks(text, "text"))
