"""Deleting the sequences of caches that are closed, reset or collected."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from attnd.client import Client
from attnd.errors import AttndError, UnknownSequence
from attnd.session import Session


def delete(control: Session | Client, names: Sequence[str]) -> None:
    """Delete these sequences; a missing one (lost with its engine, say) is no error."""
    for name in names:
        with contextlib.suppress(UnknownSequence):
            control.delete_sequence(name)


def delete_behind(control: Session | Client, names: Sequence[str]) -> None:
    """Delete the sequences of a cache that was collected.

    The collector runs in the midst of anything, a call of this very session included, so a thread
    does it, for which the session waits when it is closed. Errors are ignored.
    """
    if names:
        thread = threading.Thread(target=delete_quietly, args=(control, list(names)), daemon=True)
        thread.start()
        control.dependents.add(thread.join)


def delete_quietly(control: Session | Client, names: Sequence[str]) -> None:
    with contextlib.suppress(AttndError, RuntimeError, OSError):
        delete(control, names)
