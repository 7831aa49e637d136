"""The README tells the truth: paths exist, its Python parses, its settings are the defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from bench.servers import attnd
from config.settings import load_settings

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def tree() -> Iterator[tuple[str, str]]:
    """(path, description) of every line of the file tree."""
    folders: list[str] = []
    for line in blocks("text")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, told = line.strip().partition(" ")
        folders[depth:] = [name] if name.endswith("/") else []
        yield "".join(folders[:depth]) + name, told.strip()


@pytest.mark.parametrize(("path", "told"), list(tree()))
def test_every_path_of_the_tree_exists_and_is_told_in_eight_words(path: str, told: str) -> None:
    assert (ROOT / path).exists(), f"{path} is not there"
    assert len(told.split()) <= 8, f"{path}: {told}"


def test_every_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_curl_of_the_readme_gives_what_it_should() -> None:
    told = re.search(r'make run ARGS="(.+?)"', README)
    assert told
    posts = re.findall(r"^post (\S+) '(.+?)'$", blocks("sh")[1], re.MULTILINE | re.DOTALL)
    assert [route for route, _ in posts] == ["sequences", "append", "sequences", "decode"]
    json_body = {"content-type": "application/json"}
    with (
        attnd(*told[1].split()) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        for route, body in posts:
            answer = client.post(f"/v1/{route}", content=body, headers=json_body)
            assert answer.is_success, f"{route}: {answer.text}"
        pool = client.get("/v1/pool").json()
    first, second = (answer.json()["tensors"]["o"]["data"][row * 4] for row in (0, 1))
    near, far = 1 / (1 + math.exp(-4.5)), 1 / (1 + math.exp(4.5))  # scores 9/2 and 0
    assert first == pytest.approx(near * 1 + far * 5, abs=1e-3)
    assert second == pytest.approx(far * 1 + near * 5, abs=1e-3)
    assert pool["sequences"] == 2


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    assert "127.0.0.1:8080" in source
    with attnd() as server:
        here = source.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
        exec(compile(here, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(8, 32, 128) (8, 32) 2\n"


def test_every_target_that_the_readme_names_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert targets >= {"run", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_defaults_told_are_the_defaults() -> None:
    settings = load_settings([])
    pool, server = settings.pool, settings.server
    shape = f"{pool.num_layers}, {pool.num_kv_heads}, {pool.head_dim}"
    told = re.findall(r"^\| (`[a-z]+\..+?) \| (.+?) \|", README, re.MULTILINE)
    defaults = {keys.split("`")[1]: default.strip("`") for keys, default in told}
    assert defaults["pool.num_layers"] == shape
    assert defaults["pool.page_size"] == str(pool.page_size)
    assert defaults["pool.dtype"] == pool.dtype
    assert defaults["pool.layout"] == pool.layout
    assert defaults["backend.kind"] == settings.backend.kind
    assert defaults["server.host"] == f"{server.host}, {server.port}"
    assert defaults["server.queue_depth"] == f"{server.queue_depth}, {server.deadline_s:g}"
