"""Sizes and wording that every change keeps: folders, Markdown, the README, phrases."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TRACKED: Final = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
FILES: Final = [name for name in TRACKED if (ROOT / name).is_file()]
MAX_FILES: Final = 16
MAX_COLUMNS: Final = 100
README_LINES: Final = 200
QUOTES: Final = {"CHANGELOG.md", "tests/test_house.py"}
"""They quote old names, and the phrases themselves."""
PHRASES: Final = re.compile(
    r"\b(?:t(?:old|ells?)|who(?:ever|m)|(?:no|some)body|(?:is|are) to be|let(?: in|s? go)"
    r"|anew|so many|dealt|patience|at a glance)\b",
    re.IGNORECASE,
)


def test_no_folder_has_more_files_than_a_reader_can_survey() -> None:
    modules = (name for name in FILES if name.endswith(".py") and not name.endswith("__init__.py"))
    counts = Counter(name.rpartition("/")[0] for name in modules)
    found = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert not found, f"at most {MAX_FILES} files a folder: {found}"


def test_markdown_wraps() -> None:
    long = [
        f"{name}:{number}: {len(line)} columns"
        for name in FILES
        if name.endswith(".md")
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not long, long


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES


def test_phrases_that_a_reader_has_to_translate_do_not_come_back() -> None:
    found = [
        f"{name}:{number}: {match[0]}"
        for name in FILES
        if name.endswith((".py", ".md", ".cu", ".cuh")) and name not in QUOTES
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for match in PHRASES.finditer(line.replace("_", " "))
    ]
    assert not found, found
