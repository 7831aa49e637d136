"""Writes docs/settings.md, all settings with their defaults, from the docstrings in config/.

python docs/settings_page.py [--check]   # --check: exit 1 if the page is not current
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pages import write  # noqa: E402

from config.settings import SECTIONS, load_settings  # noqa: E402

PAGE: Final = ROOT / "docs" / "settings.md"
HEAD: Final = """# Settings

Later ones win: `config/default.yaml`, a file (`--config FILE`, or `ATTND_CONFIG`), the environment
(`ATTND_POOL__NUM_PAGES=4096`), the command line (`--pool.num-pages 4096`). A setting in bytes takes
a unit (`4GiB`). [Operations](operations.md#limits) says when to change the limits. `make map`
writes this page from the code.
"""


def lines() -> Iterator[str]:
    settings = load_settings([])
    for name, section in SECTIONS.items():
        yield f"\n## {name}\n"
        yield fill(section.__doc__ or "") + "\n"
        for key, field in section.model_fields.items():
            default = shown(key, getattr(getattr(settings, name), key))
            yield fill(f"- **`{name}.{key}`** ({default}): {field.description}")


def fill(text: str) -> str:
    words = " ".join(text.split())
    indent = "  " if words.startswith("- ") else ""
    return textwrap.fill(words, 100, subsequent_indent=indent, break_on_hyphens=False)


def shown(key: str, default: Any) -> str:
    if default is None or default == ():
        return "none"
    if key.endswith("_bytes") and default and default % 2**10 == 0:
        unit, size = next((u, s) for u, s in UNITS if default % s == 0)
        return f"{default // size} {unit}"
    return str(default).lower() if isinstance(default, bool) else str(default)


UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


if __name__ == "__main__":
    sys.exit(write(PAGE, HEAD.rstrip(), lines()))
