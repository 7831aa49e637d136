"""Objects that are closed before their session or client: caches of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

from attnd.errors import AttndError

Close = Callable[[], object]


class Dependents:
    """What uses the connections of a session or client; its views share this."""

    __slots__ = ("_closes",)

    def __init__(self) -> None:
        self._closes: list[weakref.WeakMethod[Close]] = []

    def add(self, close: Close) -> None:
        """Have `close`, a method of a living object, called before the session closes.

        The garbage collector may call this anywhere: it takes no lock.
        """
        self._closes[:] = [known for known in self._closes if known() is not None]
        self._closes.append(weakref.WeakMethod(close))

    def close(self) -> None:
        """Close them all. Errors are ignored, because the connections close too."""
        closes, self._closes = self._closes, []
        for known in closes:
            close = known()
            if close is not None:
                with suppress(AttndError, RuntimeError, OSError):
                    close()
