"""Tenants: in whose namespace a call is, what it may do, and how its sequences are named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from service.errors import Forbidden

Scope = Literal["read", "append", "move", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "append", "move", "admin")
"""What a key may allow. `admin` includes `move`: who may empty an engine may move its sequences."""
NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MARK: Final = "/"
"""Ends a namespace in a sequence's name; neither namespaces nor sequence ids have it."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """Whoever calls: `scopes` in one `namespace`. `prefix` begins its sequences' names in the tree.

    There is one object for each namespace and set of scopes, see `tenant_of`.
    """

    namespace: str
    scopes: frozenset[str]
    prefix: str

    def shown(self, name: str) -> str:
        """A sequence's name in the tree as its callers know it."""
        return name.removeprefix(self.prefix)

    def require(self, scope: Scope, what: str) -> None:
        """Raises Forbidden where the key lacks the scope."""
        if scope in self.scopes or (scope == "move" and "admin" in self.scopes):
            return
        has = ", ".join(one for one in SCOPES if one in self.scopes) or "none"
        told = f"{what} asks for the scope {scope}, this key has {has}: use another key"
        raise Forbidden(told, scope=scope)


OPEN: Final = Tenant("default", frozenset(SCOPES), "")
"""Everybody, where the service has no keys."""
NOBODY: Final = Tenant("", frozenset(), MARK)
"""A door by itself, where calls are their callers' and need a key."""


@cache
def interned(namespace: str, scopes: frozenset[str]) -> Tenant:
    return Tenant(namespace, scopes, f"{namespace}{MARK}")


def tenant_of(namespace: str, scopes: Iterable[str]) -> Tenant:
    """The tenant of a key. Raises ValueError for a namespace or a scope that cannot be."""
    if not NAMESPACE.fullmatch(namespace):
        raise ValueError(f"namespace {namespace[:80]!r}: 1 to 64 characters of A-Z a-z 0-9 . _ -")
    given = frozenset(scopes)
    if unknown := sorted(given.difference(SCOPES)):
        raise ValueError(f"scope {unknown[0][:80]!r}: one of {', '.join(SCOPES)}")
    if not given:
        raise ValueError(f"no scope: give some of {', '.join(SCOPES)}")
    return interned(namespace, given)
