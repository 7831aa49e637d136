"""Words pydantic's errors for callers: rules and suggestions, for settings and requests."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel

LONGEST_LIST: Final = 12
"""Maximum number of known names that an error lists if none is similar to the given one."""

LONGEST_NAME: Final = 64
"""Longer names get no suggestion: callers choose them, and the search is slow."""

LIMITS: Final = {
    "greater_than_equal": ("ge", "must be greater than or equal to {}"),
    "greater_than": ("gt", "must be greater than {}"),
    "less_than_equal": ("le", "must be less than or equal to {}"),
    "less_than": ("lt", "must be less than {}"),
    "multiple_of": ("multiple_of", "must be a multiple of {}"),
    "too_short": ("min_length", "must have at least {} entries"),
    "too_long": ("max_length", "must have at most {} entries"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "must have at most {} characters"),
}
"""By type of pydantic's problem: the limit's name in its context, and the rule."""

KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "an object",
    "model": "an object",
    "mapping": "an object",
    "path": "a path",
    "bytes": "bytes",
}
"""Required kind of value, by the first word of the problem's type."""

PATTERNS: Final = {
    r"^(\.{0,2}[A-Za-z0-9_:-]|\.{3})[A-Za-z0-9._:-]*$": (
        "1 to 128 letters, digits or any of . _ : -, and not . or .."
    ),
    r"^[A-Za-z0-9._:-]{0,128}$": "up to 128 letters, digits or any of . _ : -",
    r"^[0-9a-f]{32}$": "32 digits in hex, 0-9 and a-f",
    r"^[0-9a-f]{64}$": "64 digits in hex, 0-9 and a-f",
}
GIVEN: Final = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a fraction"),
    (str, "text"),
    (Mapping, "an object"),
    (Sequence, "a list"),
    (type(None), "null"),
)


def rule_of(problem: Mapping[str, Any]) -> str:
    """The rule that a problem of pydantic reports, with its limit."""
    kind, context = str(problem["type"]), problem.get("ctx") or {}
    if kind in LIMITS:
        name, rule = LIMITS[kind]
        text = rule.format(number(context[name]))
        return text.removesuffix("ies") + "y" if text.endswith(" 1 entries") else text
    match kind:
        case "value_error" | "assertion_error":
            return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion ")
        case "literal_error" | "enum":
            return one_of(problem)
        case "string_pattern_mismatch":
            pattern = str(context["pattern"])
            words = f": {PATTERNS[pattern]}" if pattern in PATTERNS else ""
            return f"must match the pattern {pattern}{words}"
        case "finite_number":
            return "must be a finite number"
        case "int_from_float":
            return "must be an integer"
        case "missing":
            return "must be given"
    wanted = KINDS.get(kind.split("_")[0])
    if wanted is not None and kind.endswith(("_type", "_parsing", "_attributes_type")):
        given = kind_of(problem["input"])
        but = "" if given in (wanted, "") or kind.endswith("_parsing") else f", not {given}"
        return f"must be {wanted}{but}"
    return str(problem["msg"]).replace("Input should be", "must be")


def one_of(problem: Mapping[str, Any]) -> str:
    """The rule with the allowed values, and the one most similar to the given value."""
    allowed = str((problem.get("ctx") or {}).get("expected", ""))
    names = [part.strip().strip("'") for part in allowed.replace(" or ", ", ").split(",")]
    rule = f"must be {allowed}"
    given = problem["input"]
    close = closest(given, names) if isinstance(given, str) else ""
    return f"{rule}: did you mean {close}?" if close else rule


def number(value: object) -> str:
    """A limit as text: 1e-10, 3, 2147483647."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def kind_of(value: object) -> str:
    return next((words for kind, words in GIVEN if isinstance(value, kind)), "")


def closest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`, ignoring dashes and case; empty if none is."""
    if len(name) > LONGEST_NAME:
        return ""
    plain = {one.replace("-", "_").lower(): one for one in known}
    found = difflib.get_close_matches(name.replace("-", "_").lower(), plain, n=1, cutoff=0.65)
    return plain[found[0]] if found else ""


def hint(name: str, known: Iterable[str], kind: str, before: str = "") -> str:
    """`: did you mean …?`, or the list of known names if they are few.

    `kind` is their plural noun; `before` is put before a suggested name.
    """
    names = list(known)
    if close := closest(name, names):
        return f": did you mean {before}{close}?"
    if not names:
        return f": it has no {kind}"
    if len(names) <= LONGEST_LIST:
        return f": its {kind} are {', '.join(names)}"
    return ""


def place_of(
    model: type[BaseModel], loc: Sequence[int | str]
) -> tuple[str, type[BaseModel] | None]:
    """A problem's path in the caller's names, without pydantic's branches of unions, and the model
    of the last name, if any."""
    parts: list[str] = []
    inside: Any = model
    owner: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            parts.append(str(part))
            continue
        fields = fields_of(inside)
        if fields is None:
            continue  # the branch of a union
        parts.append(part)
        owner = next((one for one in models_in(inside)), None)
        inside = fields.get(part)
    return ".".join(parts), owner


def fields_of(kind: Any) -> dict[str, Any] | None:
    """Types by name of the fields of the models in a type; None without a model."""
    found: dict[str, Any] = {}
    models = models_in(kind)
    for model in models:
        found |= {name: field.annotation for name, field in model.model_fields.items()}
    return found if models else None


def models_in(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in models_in(part)]


def first_of(problems: Sequence[Any]) -> Any:
    """The problem to report: the first one; among the branches of a union, the deepest."""
    first = problems[0]
    head = first["loc"][:1]
    same = [one for one in problems if one["loc"][:1] == head and head]
    if any(isinstance(part, str) and "[" in part for one in same for part in one["loc"]):
        return max(same, key=lambda one: len(one["loc"]))
    return first
