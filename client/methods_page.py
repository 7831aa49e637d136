"""Writes client/METHODS.md, the reference of the client's methods and results, from docstrings.

python client/methods_page.py          writes the page
python client/methods_page.py --check  exits with 1 when the page is not up to date
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from attnd import AsyncClient, Client, Session, errors
from attnd.methods import Unquoted
from attnd.wire import answers
from attnd.wire.answer_table import TEXT

PAGE: Final = Path(__file__).with_name("METHODS.md")
WIDTH: Final = 100
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "Sequences": (
        *("create_sequence", "create_sequences", "get_sequence", "list_sequences"),
        *("sequence_page", "delete_sequence", "delete_sequences", "truncate"),
        *("truncate_sequences", "page_table"),
    ),
    "Rows and attention": (
        *("append", "gather", "decode", "prefill", "ragged_prefill", "cascade", "merge"),
    ),
    "The prefix cache": (
        *("match_prefix", "prefetch", "commit", "commit_sequences", "renew_lease"),
        *("release_lease", "pin", "unpin", "holds", "evict", "clear", "events", "event_page"),
        *("get_namespace", "set_namespace"),
    ),
    "Records": (
        *("put_records", "get_records", "contains_records", "touch_records", "delete_records"),
        *("clear_records", "release_records"),
    ),
    "Moving sequences": (
        *("export", "import_", "export_header", "export_part", "begin_import", "import_part"),
        *("end_import", "get_import", "cancel_import"),
    ),
    "The service": (
        *("info", "pool", "engines", "drain_engine", "snapshot", "live", "ready", "wait_ready"),
        *("metrics",),
    ),
    "The client": ("with_options", "send", "close", "aclose"),
    "`Session` only": ("empty", "slots", "step"),
}
"""Public methods by heading; every one must be in here."""
INTRODUCTION: Final = """\
# Methods

`Client` and `Session` have these methods; `AsyncClient` has them awaited. The default `...` is
the service's. [Results](#results) are frozen dataclasses of `attnd`, and [errors](#errors) its
exceptions; `help()` describes them too. `make map` writes this page from the docstrings.
"""
RESULTS: Final = """\
## Results

Lists are tuples, and null is None. `meta` has the request id and the seconds per stage.
"""
ERRORS: Final = """\
## Errors

Each has `status`, `code`, `title`, `detail`, `meta` and `problem`, the whole document, and the
members of its code.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for heading, names in GROUPS.items():
        parts += [f"## {heading}\n", *[entry(name) for name in names]]
    parts += [RESULTS, *[result(one) for one in results()]]
    parts += [f"{ERRORS}\n| class | HTTP | members |\n|---|---|---|"]
    kinds = ((error.__name__, error.kind) for error in errors.ERRORS.values())
    rows = [f"| `{name}` | {kind.status} | {code(kind.members)} |" for name, kind in kinds]
    return "\n".join([*parts, *rows, ""])


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def results() -> list[type[Any]]:
    """The results, and the classes of their fields, in the order of the table."""
    found = [one for one in vars(answers).values() if isinstance(one, type)]
    return [one for one in found if one.__module__ == answers.__name__]


def result(kind: type[Any]) -> str:
    """A class, and its fields with their types and texts."""
    text = inspect.getdoc(kind) or ""
    known = {name: " ".join(one.split()) for name, one in TEXT.findall(text)}
    parts = [f"### `{kind.__name__}`\n", *paragraphs(TEXT.sub("", text).strip())]
    for field in fields(kind):
        about = f": {known[field.name]}" if field.name in known else ""
        line = f"- `{field.name}: {str(field.type).replace('Listed', 'Int32')}`{about}"
        parts.append(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(parts) + "\n"


def entry(name: str) -> str:
    """A method's signature and documentation."""
    method = find(name)
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())[1:]
    shown = [str(brief(one)) for one in parameters]
    first = next((i for i, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
    if first is not None:
        shown.insert(first, "*")
    returned = str(signature.return_annotation).strip("'")
    call = f"{name}({', '.join(shown)}) -> {returned}"
    call = textwrap.fill(call, WIDTH, subsequent_indent="    ")
    text = inspect.getdoc(method) or ""
    return "\n".join([f"### `{name}`\n\n```python\n{call}\n```\n", *paragraphs(text)])


def brief(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter without its annotation, and without a default that only its code shows."""
    default = parameter.default
    if callable(default) and default is not parameter.empty:
        default = Unquoted(default.__name__)
    return parameter.replace(annotation=parameter.empty, default=default)


def find(name: str) -> Any:
    return next(getattr(one, name) for one in (Client, AsyncClient, Session) if hasattr(one, name))


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring, wrapped."""
    for paragraph in text.split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), WIDTH) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
