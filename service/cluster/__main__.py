"""A cluster's door, `http`, `grpc` or `zmq`: the same as of one engine, with a router behind it;
started by `python -m service`."""

from __future__ import annotations

import sys
from functools import partial

from config.sections import Settings
from service.doors.upstream import MakeUpstream


def main() -> int:
    """Serve until drained; the process's exit status."""
    kind = sys.argv.pop(1)
    from service.cluster.router import Router

    def router_of(settings: Settings) -> MakeUpstream:
        return partial(Router, spill=settings.scale.spill)

    if kind == "grpc":
        from service.doors.grpc.__main__ import main as serve
    elif kind == "zmq":
        from service.doors.zmq.__main__ import main as serve
    else:
        from service.doors.http.__main__ import main as serve
    return serve(router_of)


if __name__ == "__main__":
    sys.exit(main())
