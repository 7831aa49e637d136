"""Whether a client that has closed its sending side is still there."""

from __future__ import annotations

import select
from typing import Any


def hung_up(sock: Any) -> bool:
    """Both directions are closed, as far as the system knows. Where it has no poll(), a client that
    closed one direction counts as gone."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # hang-ups and errors are told unasked
    return bool(poll.poll(0))
