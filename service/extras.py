"""Extras: packages that only some settings need."""

from __future__ import annotations

from typing import Final

EXTRAS: Final = {
    "oip": ("grpcio", "protobuf"),
    "zmq": ("pyzmq", "msgspec"),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "ray": ("ray[serve]",),
}
"""The packages of each extra in pyproject.toml."""


def how_to_install(extra: str) -> str:
    """A remedy that works in a clone, and one that works anywhere."""
    packages = " ".join(f"'{name}'" if "[" in name else name for name in EXTRAS[extra])
    return f"pip install {packages} (or, in attnd's repository, pip install '.[{extra}]')"
