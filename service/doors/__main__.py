"""The process of a door, `http`, `grpc` or `zmq`; started by `python -m service`."""

from __future__ import annotations

import sys

from service.doors.kit.link import Link
from service.doors.kit.process import run_door
from service.doors.kit.upstream import MakeUpstream


def main(make_upstream: MakeUpstream = Link) -> int:
    """Serve until drained; returns the process's exit status."""
    return run_door(sys.argv.pop(1), make_upstream)


if __name__ == "__main__":
    sys.exit(main())
