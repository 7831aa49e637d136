"""The process of a door, `http` or `zmq`; started by `python -m service`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from service.doors.kit.link import Link
from service.doors.kit.process import DoorServer, Setup, run_door
from service.doors.kit.upstream import MakeUpstream


def main(make_upstream: MakeUpstream = Link) -> int:
    """Serve until drained; returns the process's exit status."""
    kind = sys.argv.pop(1)

    def load() -> Callable[[Setup], DoorServer]:
        module = import_module(f"service.doors.{kind}.server")
        made: Callable[[Setup], DoorServer] = getattr(module, f"{kind.title()}Server")
        return made

    return run_door(kind, load, make_upstream)


if __name__ == "__main__":
    sys.exit(main())
