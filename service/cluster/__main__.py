"""A cluster's door, `http`, `grpc` or `zmq`: the door of one engine with a router as its upstream.
Started by `python -m service`."""

from __future__ import annotations

import sys


def main() -> int:
    """Serves until drained; returns the exit status."""
    kind = sys.argv.pop(1)
    from service.cluster.routing.router import Router

    if kind == "grpc":
        from service.doors.grpc.__main__ import main as serve
    elif kind == "zmq":
        from service.doors.zmq.__main__ import main as serve
    else:
        from service.doors.http.__main__ import main as serve
    return serve(Router)


if __name__ == "__main__":
    sys.exit(main())
