"""Where sequences are: what their ids tell, and a bounded memory of those that tell nothing.

An id that the cluster makes ends in the tag of the engine that the sequence was made on: the first
digits of the engine's `instance_id`, so an engine that was started anew has another one. Of engines
that a sequence is dealt out over there are all tags, by rank. Ids that
callers choose, and sequences that were moved, are remembered; what is not remembered, the engines
are asked for. A wrong memory does no harm either: the engine answers 404, and all are asked.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections import OrderedDict
from typing import Final

TAG_DIGITS: Final = 8
BETWEEN: Final = "-"
"""Stands between the tags of the engines that a sequence is dealt out over."""
TAGGED: Final = re.compile(rf".*\.([0-9a-f]{{{TAG_DIGITS}}}(?:{BETWEEN}[0-9a-f]{{{TAG_DIGITS}}})*)")
MOST_REMEMBERED: Final = 2**20
Name = tuple[str, str]
"""Namespace and id."""


def tag_of_instance(instance_id: str) -> str:
    return instance_id[:TAG_DIGITS]


def tags_of(tag: str) -> list[str]:
    """The engines of a tag, by rank."""
    return tag.split(BETWEEN)


def made_id(tag: str) -> str:
    """An id that nobody else makes: 80 random bits, and the engine's tag."""
    return f"seq-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}.{tag}"


def tag_in(name: str) -> str | None:
    """The tag that an id ends in. An id that a caller chose may look like it, and mean nothing."""
    found = TAGGED.fullmatch(name)
    return None if found is None else found.group(1)


class Names:
    """The tags of engines by the sequences that are, or were last known to be, theirs."""

    __slots__ = ("changes", "known", "most")

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self.known: OrderedDict[Name, str] = OrderedDict()
        self.most = most
        self.changes = 0
        """How often what was known of a sequence has become another thing."""

    def tag(self, name: Name) -> str | None:
        """What is remembered, else what the id tells."""
        return self.known.get(name) or tag_in(name[1])

    def learn(self, name: Name, tag: str) -> None:
        """A sequence is there; the one learned longest ago is forgotten for it."""
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
