"""Media types of requests and responses."""

from __future__ import annotations

from typing import Final

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
OCTETS: Final = "application/octet-stream"
