"""The README and the docs are right: paths and links exist, code runs and prints what they show,
defaults are true."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from attnd import AsyncClient, Client, Session

from bench.driver.servers import attnd
from config.settings import load_settings
from service import __version__
from service.errors import KINDS
from service.keys import line_of, new_key
from tests.harness.plain_http import http_client
from tests.harness.processes import run

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """A page's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def tree() -> Iterator[tuple[str, str]]:
    """(path, description) of every line of the file tree."""
    folders: list[str] = []
    for line in blocks("text")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, text = line.strip().partition(" ")
        folders[depth:] = [name] if name.endswith("/") else []
        yield "".join(folders[:depth]) + name, text.strip()


@pytest.mark.parametrize("path", [path for path, _ in tree()])
def test_every_path_of_the_map_exists(path: str) -> None:
    assert (ROOT / path).exists()


PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "bench", "docs", "docs/decisions", "docs/tutorials", "client", "examples")
    for path in (ROOT / folder).glob("*.md")
)


def anchors(path: Path) -> set[str]:
    """The anchors of a page: its headings, as hosts of repositories spell them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_its_heading(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"


@pytest.mark.long
def test_the_curl_of_the_readme_gives_the_expected_reply() -> None:
    command = re.search(r'make run ARGS="(.+?)"', README)
    assert command
    posts = re.findall(r"^post (\S+) '(.+?)'$", blocks("sh")[2], re.MULTILINE | re.DOTALL)
    *posts, last = posts
    assert [route for route, _ in posts] == ["sequences", "append", "sequences", "decode"]
    json_body = {"content-type": "application/json"}
    with (
        attnd(*command[1].split()) as server,
        http_client(f"http://127.0.0.1:{server.port}") as client,
    ):
        for route, body in posts:
            answer = client.post(f"/v1/{route}", content=body, headers=json_body)
            assert answer.is_success, f"{route}: {answer.text}"
        pool = client.get("/v1/pool").json()
        client.post(f"/v1/{last[0]}", content=last[1], headers=json_body).raise_for_status()
        assert client.get("/v1/pool").json()["sequences"] == 0, "a second run finds the ids taken"
    first, second = (answer.json()["tensors"]["o"]["data"][row * 4] for row in (0, 1))
    near, far = 1 / (1 + math.exp(-4.5)), 1 / (1 + math.exp(4.5))  # scores 9/2 and 0
    assert first == pytest.approx(near * 1 + far * 5, abs=1e-3)
    assert second == pytest.approx(far * 1 + near * 5, abs=1e-3)
    assert pool["sequences"] == 2
    ratio = re.search(r'"sharing_ratio": ([0-9.]+)', README)
    assert ratio and pool["sharing_ratio"] == float(ratio[1])


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1], ids=["client", "session"])
def test_the_python_of_the_readme_runs(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    source = blocks("python")[index]
    with attnd() as server:
        here = source.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
        here = here.replace("Session()", f"Session({server.socket!r})")
        assert here != source
        for _ in range(2):
            exec(compile(here, "README.md", "exec"), {})
            with http_client(f"http://127.0.0.1:{server.port}") as client:
                pool = client.get("/v1/pool").json()
            assert pool["free"] == pool["total"], "a run leaves pages behind"
    assert capsys.readouterr().out == "(8, 32, 128) (8, 32) 2\n" * 2


def test_every_target_that_the_readme_names_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert targets >= {"run", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_shows_the_defaults_of_the_settings() -> None:
    settings = load_settings([])
    rows = re.findall(r"^\| (`[a-z]+\.[^|]+?) \| ([^|]+?) \|", README, re.MULTILINE)
    assert len(rows) > 8
    for names, defaults in rows:
        keys = re.findall(r"`(.+?)`", names.split(" (")[0])
        section, _, first = keys[0].partition(".")
        values = [getattr(getattr(settings, section), key) for key in (first, *keys[1:])]
        shown = [value.strip("`") for value in defaults.removesuffix(" pages").split(", ")]
        expected = ["none" if value is None else f"{value}" for value in values]
        assert shown == [one.removesuffix(".0") for one in expected][: len(shown)], names


def test_the_version_is_the_same_everywhere() -> None:
    found = {
        name: re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[0]
        for name, pattern in {
            "pyproject.toml": r'^version = "(.+)"',
            "client/pyproject.toml": r'^version = "(.+)"',
            "client/src/attnd/__init__.py": r'^__version__ = "(.+)"',
            "Dockerfile": r'image\.version="(.+)"',
            "CHANGELOG.md": r"^## ([0-9]+\.[0-9]+\.[0-9]+)",
        }.items()
    }
    assert set(found.values()) == {__version__}, found


def table_rows(page: str, section: str) -> list[list[str]]:
    """The cells of the first table under a heading of a page, its head left out."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n## {section}\n")[1]
    table = text[text.index("\n|") :].split("\n\n")[0]
    lines = re.findall(r"^\|.*\|$", table, re.MULTILINE)
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines[2:]]


def test_the_api_page_has_every_error_and_its_status() -> None:
    shown = {(int(status), code.strip("`")) for status, code, *_ in table_rows("api.md", "Errors")}
    assert shown == {(kind.status, kind.code) for kind in KINDS.values()}


def test_the_operations_page_has_the_defaults_of_the_limits() -> None:
    settings = load_settings([])
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for names, defaults, *_ in table_rows("operations.md", "Limits"):
        keys, values = re.findall(r"`(.+?)`", names), defaults.split(", ")
        section = getattr(settings, keys[0].split(".")[0])
        for key, value in zip(keys, values, strict=True):
            number, _, unit = value.partition(" ")
            default = getattr(section, key.split(".")[-1])
            is_number = not isinstance(default, str)
            stated = float(number) * units.get(unit, 1) if is_number else value
            assert default == stated, f"{key}: {value}"


# The client's pages.

CLIENT: Final = ROOT / "client"


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


@pytest.mark.parametrize(
    "page", ["client/methods_page.py", "docs/metrics_page.py", "docs/settings_page.py"]
)
def test_a_page_made_from_code_is_up_to_date(page: str) -> None:
    done = run(sys.executable, ROOT / page, "--check", cwd=CLIENT / "src")
    assert done.returncode == 0, f"run `make map`: {done.stderr}"


def test_structures_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    listed = run("git", "ls-files", check=True).stdout.splitlines()
    known = {f"/{path}" for path in listed} | {f"/{path.rpartition('/')[0]}/" for path in listed}
    named = re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.py|/))`", text)
    missing = {one for one in named if not any(path.endswith(f"/{one}") for path in known)}
    assert len(named) > 40 and not missing, missing


@pytest.mark.long
def test_the_first_example_of_the_clients_page_can_be_run_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = blocks("python", (CLIENT / "README.md").read_text(encoding="utf-8"))[0]
    with attnd() as server:
        here = source.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
        for _ in range(2):
            exec(compile(here, "client/README.md", "exec"), {})
    assert capsys.readouterr().out.count("(2, 32, 128) (2, 32) 2") == 2


# The page of examples/serve names lines of its code.

SERVE: Final = ROOT / "examples" / "serve"


def test_line_references_point_at_the_definitions_that_they_name() -> None:
    readme = (SERVE / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)", readme)
    assert len(found) >= 12
    for name, file, line in found:
        text = (SERVE / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"\s*(async )?(def|class) {name}\b", text), (
            f"{name}, {file}:{line}: {text}"
        )


TUTORIALS: Final = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
MOST_LINES: Final = 55
"""Maximum lines of the scheduler in place of a block manager's."""
TENANTS: Final = {
    "SEARCH_KEY": ("search", ("read", "append")),
    "MAIL_KEY": ("mail", ("read", "append")),
    "ADMIN_KEY": ("ops", ("read", "append", "admin")),
}


@pytest.mark.long
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_the_output_in_its_text(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    keys = {name: new_key() for name in TENANTS}
    path = tmp_path / "keys"
    path.write_text("".join(line_of(keys[name], *TENANTS[name]) + "\n" for name in TENANTS))
    path.chmod(0o600)
    scripts = [block.replace("\\\n", "") for block in blocks("sh", text)]
    command = next(script for script in scripts if script.startswith("attnd serve"))
    arguments = [str(path) if word == "KEYS" else word for word in shlex.split(command)[2:]]
    names: dict[str, Any] = dict(keys)
    with attnd(*arguments) as server:
        for source in blocks("python", text):
            here = source.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
            here = here.replace("Session(port=8080)", f"Session({server.socket!r})")
            exec(compile(here, page.name, "exec"), names)
    assert capsys.readouterr().out == "".join(blocks("text", text))


def test_the_scheduler_without_a_block_manager_is_short() -> None:
    page = ROOT / "docs" / "tutorials" / "from-a-block-manager.md"
    scheduler = blocks("python", page.read_text(encoding="utf-8"))[0]
    assert "class Scheduler" in scheduler
    assert sum(bool(line.strip()) for line in scheduler.splitlines()) <= MOST_LINES
