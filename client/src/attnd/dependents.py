"""What is to end before a session or client is closed: caches of transformers on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

from attnd.errors import AttndError

End = Callable[[], None]


class Users:
    """What uses the connections of a session or client; views of one share it."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: list[weakref.WeakMethod[End]] = []

    def add(self, end: End) -> None:
        """Have `end`, a method of a living object, called at the close.

        The collector may call this anywhere: it takes no lock.
        """
        self._ends[:] = [known for known in self._ends if known() is not None]
        self._ends.append(weakref.WeakMethod(end))

    def end(self) -> None:
        """End them all. An error is nobody's, as the connections end too."""
        ends, self._ends = self._ends, []
        for known in ends:
            end = known()
            if end is not None:
                with suppress(AttndError, RuntimeError, OSError):
                    end()
