"""Parsing answers: whatever breaks the service's contract is a `ProtocolError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attnd.calls.call import Reply
from attnd.errors import ProtocolError

T = TypeVar("T")


def reads(parse: Callable[[Reply], T]) -> Callable[[Reply], T]:
    """A parser whose surprises (a field missing, a value of another kind) are `ProtocolError`."""

    def parse_or_say(reply: Reply) -> T:
        try:
            return parse(reply)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            detail = f"the answer breaks the service's contract: {error!r}"
            raise ProtocolError(detail, reply.meta.request_id) from error

    return parse_or_say
