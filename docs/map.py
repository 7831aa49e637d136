"""Writes docs/files.md, the map of the code: every module with the first sentence of its docstring.

python docs/map.py [--check]   # --check: exit 1 if the page is not current
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pages import write

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "files.md"
TREES: Final = ("service", "kernels", "client/src/attnd", "config", "simulation", "bench")
HEAD: Final = """# Files

Every module and the first sentence of its docstring. `make map` writes this page.
"""


def lines() -> Iterator[str]:
    for tree in TREES:
        folders = sorted({path.parent for path in (ROOT / tree).rglob("*.py")})
        for folder in folders:
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            if not files:
                continue
            yield f"## {folder.relative_to(ROOT).as_posix()}\n"
            about = sentence(folder / "__init__.py")
            if about:
                yield textwrap.fill(about, 100) + "\n"
            for path in files:
                item = f"- `{path.name}`: {sentence(path)}"
                yield textwrap.fill(item, 100, subsequent_indent="  ", break_on_hyphens=False)
            yield ""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line; empty without one."""
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


if __name__ == "__main__":
    sys.exit(write(PAGE, HEAD, lines()))
