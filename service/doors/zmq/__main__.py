"""The process of the ZeroMQ door; started by `python -m service`."""

from __future__ import annotations

import sys

from service.doors.kit.link import Link
from service.doors.kit.process import Needs, run_door
from service.doors.kit.upstream import MakeUpstream


def main(make_upstream: MakeUpstream = Link) -> int:
    """Serve until drained; returns the process's exit status."""
    needs = Needs(("zmq", "msgspec"), "cache.zmq_endpoint", "zmq")
    return run_door("service.doors.zmq.server", make_upstream, needs)


if __name__ == "__main__":
    sys.exit(main())
