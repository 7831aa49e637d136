"""Markdown tables of results, and the stamp below each: device, date, commit and command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any, Final

WIDTH: Final = 100


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], keys: int = 1) -> str:
    """A Markdown table; every row has as many cells as `head`.

    One wider than 100 columns becomes several, each of which begins with the first `keys` columns.
    """
    table = [head, *rows]
    parts = [list(range(keys))]
    for column in range(keys, len(head)):
        part = [*parts[-1], column]
        if max(len(line([row[i] for i in part])) for row in table) > WIDTH:
            part = [*range(keys), column]
            parts.append(part)
        parts[-1] = part
    return "\n\n".join(
        "\n".join(
            [line([head[i] for i in part]), f"|{'---|' * len(part)}"]
            + [line([row[i] for i in part]) for row in table[1:]]
        )
        for part in parts
    )


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def measured(results: Mapping[str, Any], note: str = "") -> str:
    """The line below a table: where, when, at which commit and by which command it was measured."""
    device = results.get("device") or results["machine"]
    stamp = f"{device}; {results['date'][:10]}; commit {results['commit']}; `{results['command']}`"
    return f"{stamp}; {note}." if note else f"{stamp}."


def with_stamp(text: str, results: Mapping[str, Any], note: str = "") -> str:
    """A table with the line `measured` below it."""
    return f"{text}\n\n{measured(results, note)}"


def number(value: float | None, form: str) -> str:
    """A number in a format; an empty cell for None."""
    return "" if value is None else format(value, form)


def wrapped(text: str) -> str:
    """Markdown with its prose in lines of at most 100 columns; tables and pictures stay."""

    def wrap(line: str) -> str:
        if len(line) <= WIDTH or line.startswith(("|", "!")):
            return line
        return fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)

    return "\n".join(map(wrap, text.split("\n")))
