"""The HTTP door's process; started by `python -m service`."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
from typing import Final

from service.doors.kit.link import Link
from service.doors.kit.upstream import MakeUpstream
from service.processes.handover import CANNOT_START, Inherited, on_hang_up, receive

LOG: Final = logging.getLogger("attnd.http")


def main(make_upstream: MakeUpstream = Link) -> int:
    """Serve until drained; the process's exit status."""
    inherited = receive()
    from service.logs import set_up_logs

    set_up_logs(inherited.settings.log, inherited.process)
    raise_limit_of_files()
    return serve(inherited, make_upstream)


def serve(inherited: Inherited, make_upstream: MakeUpstream) -> int:
    from service.doors.http.server import make_server
    from service.doors.kit.tls import TlsError
    from service.doors.kit.tracing import TracingError
    from service.keys import KeysError
    from service.logs import count_dropped
    from service.metrics import Metrics
    from service.processes.watchdog import LoopWatchdog

    def watch(loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(inherited.lifeline, os._exit, 1)
        on_hang_up(lambda: loop.call_soon_threadsafe(server.read_again))

    metrics = Metrics(inherited.process, inherited.metrics)
    count_dropped(metrics.log_lines_dropped)
    try:
        server = make_server(
            inherited.settings,
            inherited.engine_socket,
            inherited.sockets,
            metrics,
            inherited.process,
            inherited.secret,
            make_upstream,
            inherited.read_file,
        )
    except (KeysError, TlsError, TracingError) as error:
        LOG.error("cannot start: %s", error)
        return CANNOT_START
    server.on_loop = watch
    server.on_ready = lambda: LoopWatchdog(inherited.process, metrics)
    server.run()
    return CANNOT_START if server.failed else 0


def raise_limit_of_files() -> None:
    """As far as the process may by itself: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
