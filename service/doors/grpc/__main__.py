"""The gRPC door's process; started by `python -m service`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from importlib.util import find_spec
from typing import Final

from service.doors.kit.link import Link
from service.doors.kit.upstream import MakeUpstream
from service.extras import how_to_install
from service.processes.handover import CANNOT_START, Inherited, on_hang_up, receive

LOG: Final = logging.getLogger("attnd.grpc")
NEEDS: Final = ("grpc", "google.protobuf")


def main(make_upstream: MakeUpstream = Link) -> int:
    """Serve until drained; the process's exit status."""
    inherited = receive()
    from service.logs import set_up_logs

    set_up_logs(inherited.settings.log, inherited.process)
    if not all(is_installed(name) for name in NEEDS):
        LOG.error("cannot start: server.grpc_port needs grpcio: %s", how_to_install("grpc"))
        return CANNOT_START
    return serve(inherited, make_upstream)


def serve(inherited: Inherited, make_upstream: MakeUpstream) -> int:
    from service.doors.grpc.server import Server
    from service.doors.kit.tls import TlsError
    from service.doors.kit.tracing import TracingError
    from service.keys import KeysError
    from service.logs import count_dropped
    from service.metrics import Metrics
    from service.processes.watchdog import LoopWatchdog

    settings, metrics = inherited.settings, Metrics(inherited.process, inherited.metrics)
    count_dropped(metrics.log_lines_dropped)
    try:
        server = Server(
            settings,
            inherited.engine_socket,
            metrics,
            inherited.process,
            inherited.secret,
            make_upstream,
            inherited.read_file,
        )
    except (KeysError, TlsError, TracingError) as error:
        LOG.error("cannot start: %s", error)
        return CANNOT_START

    def watch(loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(inherited.lifeline, os._exit, 1)
        LoopWatchdog(inherited.process, metrics)
        on_hang_up(lambda: loop.call_soon_threadsafe(server.read_again))
        loop.add_signal_handler(signal.SIGTERM, server.drain)

    asyncio.run(server.serve(settings.server.grpc_port or 0, watch))
    if server.failed:
        LOG.error("cannot start: %s", server.failed)
        return CANNOT_START
    return 0


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
