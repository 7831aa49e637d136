"""The backend of a service without a pool of pages: it has records alone, and no attention."""

from __future__ import annotations

from typing import Any, Final

from kernels.backend import PoolGeometry, Unsupported

RULE: Final = "there is no pool of pages: start a service with backend.kind = cpu or cuda"
NO_POOL: Final = f"backend.kind = none: {RULE}"


class NoPool:
    """Has the members of `Backend` that a start reads, and raises `Unsupported` for all others."""

    name: Final = "none"
    device: Final = "none"
    geometry: Final = PoolGeometry(1, 1, 1, 1, 1)
    split_keys: Final = 0
    unsupported: Final = ("pages, sequences, prefixes and attention: there is no pool",)

    def register(self, address: int, size: int) -> bool:
        return False

    def unregister(self, address: int) -> None:
        """Nothing is registered."""

    def close(self) -> None:
        """Nothing is open."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise Unsupported("backend.kind", "none", RULE)
