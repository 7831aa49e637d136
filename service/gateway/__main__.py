"""The process of the gateway, started by `python -m service`; with `--attnd URL` calls go there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from service.doors.kit.process import DoorServer, Setup, run_door


def main(argv: list[str]) -> int:
    """Serve until drained; returns the process's exit status."""
    url = ""
    if argv[1:2] == ["--attnd"]:
        url = argv[2]
        del argv[1:3]

    def load() -> Callable[[Setup], DoorServer]:
        from service.gateway import server

        return partial(server.GatewayServer, url=url)

    return run_door("oip", load)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
