"""Tenants: the namespace of a call, its scopes, and the names of its sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from service.errors import Forbidden

Scope = Literal["read", "append", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "append", "admin")
"""Permissions of keys."""
NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MARK: Final = "/"
"""Ends the namespace in a sequence's name; namespaces and sequence ids cannot contain it."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """An authenticated caller: `scopes` in one `namespace`. `prefix` begins the names of its
    sequences in the tree.

    There is one object for each namespace and set of scopes, see `tenant_of`.
    """

    namespace: str
    scopes: frozenset[str]
    prefix: str

    def shown(self, name: str) -> str:
        """A sequence's id, from its name in the tree."""
        return name.removeprefix(self.prefix)

    def require(self, scope: Scope, operation: str) -> None:
        """Raises Forbidden where the key lacks the scope."""
        if scope in self.scopes:
            return
        has = ", ".join(one for one in SCOPES if one in self.scopes) or "none"
        text = f"{operation} requires the scope {scope}, this key has {has}: use another key"
        raise Forbidden(text, scope=scope)


OPEN: Final = Tenant("default", frozenset(SCOPES), "")
"""Every caller of a service without keys."""
ANONYMOUS: Final = Tenant("", frozenset(), MARK)
"""The door's own identity, for calls not made on a client's behalf."""


@cache
def interned(namespace: str, scopes: frozenset[str]) -> Tenant:
    return Tenant(namespace, scopes, f"{namespace}{MARK}")


def tenant_of(namespace: str, scopes: Iterable[str]) -> Tenant:
    """The tenant of a key. Raises ValueError for an invalid namespace or scope."""
    if not NAMESPACE.fullmatch(namespace):
        rule = "expected 1 to 64 characters of A-Z a-z 0-9 . _ -"
        raise ValueError(f"namespace {namespace[:80]!r}: {rule}")
    given = frozenset(scopes)
    if unknown := sorted(given.difference(SCOPES)):
        raise ValueError(f"scope {unknown[0][:80]!r}: expected one of {', '.join(SCOPES)}")
    if not given:
        raise ValueError(f"no scope: give some of {', '.join(SCOPES)}")
    return interned(namespace, given)
