"""A cluster's door, `http` or `zmq`: the door of one engine with a router as its upstream.
Started by `python -m service`."""

from __future__ import annotations

import sys

from service.cluster.routing.router import Router
from service.doors.__main__ import main

if __name__ == "__main__":
    sys.exit(main(Router))
