"""The README tells the truth: paths exist, its Python parses, its settings are the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

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


def test_the_python_of_the_readme_uses_methods_that_exist() -> None:
    from attnd import Client

    (source,) = blocks("python")
    compile(source, "README.md", "exec")
    for method in re.findall(r"attnd\.(\w+)\(", source):
        assert hasattr(Client, method), method


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
