"""A cluster's door, `http`, `grpc` or `zmq`: the same as of one engine, with a router behind it;
started by `python -m service`."""

from __future__ import annotations

import sys


def main() -> int:
    """Serve until drained; the process's exit status."""
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
