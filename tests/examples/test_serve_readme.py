"""The README of examples/serve against its code: references to lines, and the size it names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Final

import pytest

SERVE: Final = Path(__file__).resolve().parents[2] / "examples" / "serve"
README: Final = (SERVE / "README.md").read_text(encoding="utf-8")
FILES: Final = sorted(SERVE.glob("*.py"))
NO_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MOST_LINES: Final = 800


def test_line_references_point_at_the_definitions_that_they_name() -> None:
    found = re.findall(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)", README)
    assert len(found) >= 12
    for name, file, line in found:
        text = (SERVE / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"\s*(async )?(def|class) {name}\b", text), (
            f"{name}, {file}:{line}: {text}"
        )


def test_a_request_is_followed_in_eight_steps() -> None:
    steps = README.split("## One request, in eight steps")[1].split("\n## ")[0]
    numbers = re.findall(r"^(\d)\. ", steps, re.MULTILINE)
    assert numbers == list("12345678")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_says_what_it_is_in_other_engines(file: Path) -> None:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert "vllm" in text.lower() and "SGLang" in text


def code_lines(source: str) -> int:
    """Lines that are not blank, a comment or a docstring."""
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            kept |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            kept -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(kept)


def test_the_engine_has_at_most_800_lines_of_code() -> None:
    assert sum(code_lines(file.read_text(encoding="utf-8")) for file in FILES) <= MOST_LINES
