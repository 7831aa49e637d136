"""Calls forwarded unread to one engine: the sequences that they name, by their headers' bytes.

The engine checks the request, so the router does not have to.
"""

from __future__ import annotations

import json
from typing import Final

from service.cluster.membership.engine import Call
from service.image.json_text import is_short
from service.image.reading import MAX_VALUES
from service.operations.schema.spec import Operation, Prepared

MAX_BYTES: Final = 8 * 2**20
"""Total size of remembered headers."""
MAX_HEADER_BYTES: Final = MAX_BYTES // 8
"""Size of one remembered header: a longer one is not even hashed."""
ENTRY_BYTES: Final = 512
"""Memory of an entry beside its header."""
ID_FIELD: Final = {"sequence": "id", "sequences": "sequences"}
"""The field with the ids, by the operation's routing."""


class FastPath:
    """The ids in headers, which the layers of a step repeat."""

    __slots__ = ("known", "num_bytes")

    def __init__(self) -> None:
        self.known: dict[tuple[Operation, bytes], tuple[str, ...]] = {}
        self.num_bytes = 0

    def ids(self, call: Call, header: bytes) -> tuple[str, ...]:
        """None of them where the header is malformed, or long and not remembered."""
        if call.operation.routed not in ID_FIELD or len(header) > MAX_HEADER_BYTES:
            return ()
        found = self.known.get((call.operation, header))
        if found is None:
            found = ids_in(call.operation, header) if is_short(header) else ()
            self.remember(call.operation, header, found)
        return found

    def learn(self, call: Call, header: bytes, prepared: Prepared) -> None:
        """Remembers the ids of a header that is too long to be read by `ids`."""
        if call.operation.routed in ID_FIELD and len(header) <= MAX_HEADER_BYTES:
            self.remember(call.operation, header, ids_of(call.operation, prepared))

    def remember(self, operation: Operation, header: bytes, ids: tuple[str, ...]) -> None:
        if ids and (operation, header) not in self.known:
            self.num_bytes += len(header) + ENTRY_BYTES
            if self.num_bytes > MAX_BYTES:
                self.known.clear()
                self.num_bytes = len(header) + ENTRY_BYTES
            self.known[operation, header] = ids


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
