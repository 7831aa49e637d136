"""Calls that go to one engine as they are, found by the bytes of their headers: the engine checks
what is in them, so nobody else has to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from service.cluster.membership.engine import Call, Engine
from service.image.json_pieces import is_short
from service.image.reading import MAX_VALUES
from service.operations.schema.spec import Operation, Prepared

if TYPE_CHECKING:
    from service.cluster.routing.locator import Homes

Straight = tuple[tuple[str, ...], Engine]
"""The sequences of a call, and the engine that all of them are on."""
Several = tuple[()]
"""They are on several engines."""
REMEMBERED_BYTES: Final = 8 * 2**20
"""Of headers that are remembered, the longest at most an eighth of it."""
ENTRY_BYTES: Final = 512
"""What one takes beside its header, and more for more sequences."""
FIELD: Final = {"sequence": "id", "sequences": "sequences"}
"""Where the sequences are told, by how an operation is routed."""


class Passing:
    """What was found for headers, since the steps of a sequence repeat them, while nothing that it
    rests on has changed."""

    __slots__ = ("changes", "homes", "known", "num_bytes")

    def __init__(self, homes: Homes) -> None:
        self.homes = homes
        self.known: dict[tuple[Operation, str, bytes], Straight | Several] = {}
        self.num_bytes = 0
        self.changes = (0, 0)

    def straight(self, call: Call, header: bytes) -> Straight | None:
        """None where nobody knows yet where the sequences are, where it is not one engine that has
        them, or where the header is not what it should be."""
        if call.operation.routed not in FIELD:
            return None
        members, names = self.homes.members, self.homes.names
        if self.changes != (changes := (members.changes, names.changes)):
            self.forget()
            self.changes = changes
        key = call.operation, call.tenant.namespace, header
        found = self.known.get(key)
        if found is None and is_short(header):
            found = self.remember(call, header, ids_in(call.operation, header))
        return found or None

    def learn(self, call: Call, header: bytes, prepared: Prepared) -> None:
        """What a header names that is too long to be read here."""
        if call.operation.routed in FIELD:
            given = getattr(prepared.fields, FIELD[call.operation.routed], ())
            ids = (given,) if isinstance(given, str) else tuple(given or ())
            self.remember(call, header, ids)

    def remember(
        self, call: Call, header: bytes, ids: tuple[str, ...]
    ) -> Straight | Several | None:
        """As `look`, which is not done again for this header."""
        found = self.look(call, ids)
        if found is not None and len(header) <= REMEMBERED_BYTES // 8:
            self.num_bytes += len(header) + ENTRY_BYTES
            if self.num_bytes > REMEMBERED_BYTES:
                self.forget()
            self.known[call.operation, call.tenant.namespace, header] = found
        return found

    def forget(self) -> None:
        self.known.clear()
        self.num_bytes = 0

    def look(self, call: Call, ids: tuple[str, ...]) -> Straight | Several | None:
        """None where that may be another thing the next time."""
        if not ids:
            return None
        space, tag, by_tag = call.tenant.namespace, self.homes.names.tag, self.homes.members.by_tag
        engines = {by_tag.get(tag((space, name)) or "") for name in ids}
        if None in engines:
            return None
        engine = engines.pop()
        return () if engine is None or engines else (ids, engine)


def ids_in(operation: Operation, header: bytes) -> tuple[str, ...]:
    """The sequences that a header names; none where it is not right."""
    if header.count(b",") > MAX_VALUES:
        return ()
    try:
        told = json.loads(json.loads(header)["__metadata__"]["request"])[FIELD[operation.routed]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    ids = (told,) if isinstance(told, str) else told
    if not isinstance(ids, list | tuple) or not all(isinstance(name, str) for name in ids):
        return ()
    return tuple(ids)
