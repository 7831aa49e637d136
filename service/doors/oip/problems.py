"""Errors in the protocol's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def error_text(problem: Mapping[str, Any]) -> str:
    """The one string that the protocol's clients show: the code first, for programs."""
    return f"{problem['code']}: {problem['detail']}"
