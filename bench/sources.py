"""What a compiler sees of a CUDA source: its tokens and those of the headers it includes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from kernels.compile import CODE_OPTIONS, SOURCES, Spec

_TOKEN: Final = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*" | '(?:\\.|[^\\])'
    | \.?\d(?:[eEpP][+-]|'\w|[\w.])*
    | \w+
    | <<<|>>>|<<=|>>=|->\*|\.\.\.|::|->|\+\+|--|<<|>>|&&|\|\||\#\#|[-+*/%&|^<>=!]=
    | \S
    """,
    re.VERBOSE,
)
_COMMENT: Final = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^\\])')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
"""A comment, or, as the first group, a string or character in which none begins."""
_DIRECTIVE: Final = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_INCLUDE: Final = re.compile(r'# ?include ?"([^"]+)"')


def source_digest(kernel: Spec, arch: str, sources: Path = SOURCES) -> str:
    """Digest of all that a kernel's machine code comes from but the compiler.

    Comments, white space and the order of definitions do not count. Headers from elsewhere are the
    compiler's.
    """
    digest = hashlib.sha256()
    for part in (arch, *CODE_OPTIONS, *sorted(kernel.options)):
        digest.update(f"{part}\0".encode())
    texts = closure(f"{kernel.source}.cu", sources)
    for name in sorted(texts):
        digest.update(f"{name}\0{texts[name]}\0".encode())
    return digest.hexdigest()[:16]


def closure(name: str, sources: Path) -> dict[str, str]:
    """The source `name` and every header of the folder that it leads to, as `tokens` has them."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = tokens((sources / file).read_text(encoding="utf-8"))
            waiting += _INCLUDE.findall(found[file])
    return found


def tokens(source: str) -> str:
    """A source with one space between tokens and no comments; a directive is a line of its own."""
    joined = re.sub(r"\\\r?\n", "", source)
    plain = _COMMENT.sub(lambda found: found[1] or " ", joined)
    lines, at = [], 0
    for directive in _DIRECTIVE.finditer(plain):
        lines.append(" ".join(_TOKEN.findall(plain[at : directive.start()])))
        lines.append(" ".join(directive[0].split()))
        at = directive.end()
    lines.append(" ".join(_TOKEN.findall(plain[at:])))
    return "\n".join(line for line in lines if line)
