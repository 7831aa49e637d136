"""The base class of every group of settings."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict

UNITS: Final = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, letter in enumerate("KMGT", 1)
}
AMOUNT: Final = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(UNITS)})")


def in_bytes(value: Any) -> Any:
    """The number of bytes of a text with a unit, such as 4GiB or 1.5 MB; other values as given."""
    found = AMOUNT.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else int(float(found[1]) * UNITS[found[2]])


Bytes = Annotated[int, BeforeValidator(in_bytes)]
"""A setting of bytes: an integer, or a number with a unit."""


class Section(BaseModel):
    """A group of settings: frozen, and unknown keys are rejected."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
