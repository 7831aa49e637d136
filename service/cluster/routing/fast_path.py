"""Calls forwarded unread to one engine, recognised by their header's bytes.

The engine checks the request, so the router does not have to.
"""

from __future__ import annotations

import json
from typing import Final

from service.cluster.membership.engine import Call, Engine
from service.cluster.routing.locator import Locator
from service.image.json_text import is_short
from service.image.reading import MAX_VALUES
from service.operations.schema.spec import Operation, Prepared

Target = tuple[tuple[str, ...], Engine]
"""The sequences of a call, and the engine that all of them are on."""
NOT_ONE: Final[tuple[()]] = ()
"""They are on several engines."""
MAX_BYTES: Final = 8 * 2**20
"""Total size of remembered headers."""
MAX_HEADER_BYTES: Final = MAX_BYTES // 8
"""Size of one remembered header."""
ENTRY_BYTES: Final = 512
"""Memory of an entry beside its header."""
ID_FIELD: Final = {"sequence": "id", "sequences": "sequences"}
"""The field with the ids, by the operation's routing."""


class FastPath:
    """Targets by header, which the layers of a step repeat; valid until a sequence moves or an
    engine comes or leaves."""

    __slots__ = ("changes", "known", "locator", "num_bytes")

    def __init__(self, locator: Locator) -> None:
        self.locator = locator
        self.known: dict[tuple[Operation, str, bytes], Target | tuple[()]] = {}
        self.num_bytes = 0
        self.changes = (0, 0)

    def target(self, call: Call, header: bytes) -> Target | None:
        """None where the header is malformed or long, or its sequences are not known to be on one
        engine."""
        if not can_remember(call, header):
            return None
        changes = self.locator.members.changes, self.locator.tags.changes
        if self.changes != changes:
            self.clear()
            self.changes = changes
        key = call.operation, call.tenant.namespace, header
        found = self.known.get(key)
        if found is None and is_short(header):
            found = self.remember(call, header, ids_in(call.operation, header))
        return found or None

    def learn(self, call: Call, header: bytes, prepared: Prepared) -> None:
        """Remembers the target of a header that is too long to be read by `target`."""
        if can_remember(call, header):
            self.remember(call, header, ids_of(call.operation, prepared))

    def remember(
        self, call: Call, header: bytes, ids: tuple[str, ...]
    ) -> Target | tuple[()] | None:
        found = self.look_up(call, ids)
        key = call.operation, call.tenant.namespace, header
        if found is not None and key not in self.known:
            self.num_bytes += len(header) + ENTRY_BYTES
            if self.num_bytes > MAX_BYTES:
                self.clear()
            self.known[key] = found
        return found

    def clear(self) -> None:
        self.known.clear()
        self.num_bytes = 0

    def look_up(self, call: Call, ids: tuple[str, ...]) -> Target | tuple[()] | None:
        """None where the result may not be remembered."""
        if not ids:
            return None
        space, tag = call.tenant.namespace, self.locator.tags.tag
        by_tag = self.locator.members.by_tag
        engines = {by_tag.get(tag((space, name)) or "") for name in ids}
        if None in engines:
            return None
        engine = engines.pop()
        return NOT_ONE if engine is None or engines else (ids, engine)


def can_remember(call: Call, header: bytes) -> bool:
    """Whether the call names sequences, in a header of bounded size: others are not even hashed."""
    return call.operation.routed in ID_FIELD and len(header) <= MAX_HEADER_BYTES


def ids_of(operation: Operation, prepared: Prepared) -> tuple[str, ...]:
    """The sequences that a checked request names."""
    given = getattr(prepared.fields, ID_FIELD[operation.routed], ())
    return (given,) if isinstance(given, str) else tuple(given or ())


def ids_in(operation: Operation, header: bytes) -> tuple[str, ...]:
    """The sequences that a header names; none where it is malformed."""
    if header.count(b",") > MAX_VALUES:
        return ()
    try:
        request = json.loads(json.loads(header)["__metadata__"]["request"])
        given = request[ID_FIELD[operation.routed]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    ids = (given,) if isinstance(given, str) else given
    if not isinstance(ids, list | tuple) or not all(isinstance(name, str) for name in ids):
        return ()
    return tuple(ids)
