"""A cluster's door, `http` or `zmq`: the door of one engine with a router as its upstream, or the
ZeroMQ door with the router's events as its source. Started by `python -m service`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from service.cluster.routing.event_socket import RouterEvents
from service.cluster.routing.router import Router
from service.doors.__main__ import main
from service.doors.kit.process import DoorServer, Setup, run_door


def load_zmq() -> Callable[[Setup], DoorServer]:
    from service.doors.zmq.server import ZmqServer

    return partial(ZmqServer, make_source=RouterEvents)


if __name__ == "__main__":
    sys.exit(run_door(sys.argv.pop(1), load_zmq) if sys.argv[1] == "zmq" else main(Router))
