"""Ids that name their engine, and a bounded memory of the sequences whose ids do not.

An id made by the cluster ends in the tag of the engine that made the sequence: the first digits of
its `instance_id`, so a restarted engine has another tag. Ids chosen by callers, and sequences that
were moved, are remembered; for others the engines are asked. A wrong memory does no harm: the
engine replies 404, and then all are asked.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections import OrderedDict
from typing import Final

from service.errors import InvalidRequest

TAG_DIGITS: Final = 8
TAGGED: Final = re.compile(rf".*\.([0-9a-f]{{{TAG_DIGITS}}})")
MAX_REMEMBERED: Final = 2**20
Name = tuple[str, str]
"""Namespace and id."""


def tag_of_instance(instance_id: str) -> str:
    return instance_id[:TAG_DIGITS]


def new_id(tag: str) -> str:
    """A unique id: 80 random bits, and the engine's tag."""
    return f"seq-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}.{tag}"


ANCHOR: Final = re.compile(r"moving\.[0-9a-f]{16}")


def new_anchor() -> str:
    """A unique id for a copy that a drain makes for a while. Callers cannot choose such ids: a
    drain does not move these sequences."""
    return f"moving.{secrets.token_hex(8)}"


def refuse_anchor(field: str, name: str | None) -> None:
    """Raises InvalidRequest for an id that is reserved for such copies."""
    if name is not None and ANCHOR.fullmatch(name):
        rule = "is reserved for copies of sequences that move: choose another id"
        raise InvalidRequest(field, name, rule)


def tag_in(name: str) -> str | None:
    """The tag that an id ends in. A caller's id may look as if it had one."""
    found = TAGGED.fullmatch(name)
    return None if found is None else found.group(1)


class Tags:
    """The tag of the engine that each sequence is, or was last known to be, on."""

    __slots__ = ("changes", "known", "most")

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self.known: OrderedDict[Name, str] = OrderedDict()
        self.most = most
        self.changes = 0
        """Number of times that a remembered tag has changed or was forgotten."""

    def tag(self, name: Name) -> str | None:
        """The remembered tag, else the one in the id."""
        return self.known.get(name) or tag_in(name[1])

    def learn(self, name: Name, tag: str) -> None:
        """Remembers a sequence's tag; forgets the oldest above the limit."""
        if self.tag(name) not in (None, tag):
            self.changes += 1
        if tag_in(name[1]) == tag:
            self.known.pop(name, None)
            return
        self.known[name] = tag
        self.known.move_to_end(name)
        if len(self.known) > self.most:
            self.changes += 1
            self.known.popitem(last=False)

    def forget(self, name: Name) -> None:
        if self.known.pop(name, None) is not None:
            self.changes += 1
