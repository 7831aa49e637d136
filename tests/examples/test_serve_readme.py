"""The README of examples/serve names lines of its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

SERVE: Final = Path(__file__).resolve().parents[2] / "examples" / "serve"


def test_line_references_point_at_the_definitions_that_they_name() -> None:
    readme = (SERVE / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)", readme)
    assert len(found) >= 12
    for name, file, line in found:
        text = (SERVE / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"\s*(async )?(def|class) {name}\b", text), (
            f"{name}, {file}:{line}: {text}"
        )
