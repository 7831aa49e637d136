"""Pages of docs/ that are made from the code: writes one, or compares it with `--check`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def write(page: Path, head: str, lines: Iterable[str]) -> int:
    """The exit status: 1 for a page that is not current, with `--check`, which writes nothing."""
    text = "\n".join([head, *lines]) + "\n"
    if "--check" not in sys.argv:
        page.write_text(text, encoding="utf-8")
    return int(page.read_text(encoding="utf-8") != text)
