"""The ZeroMQ door's process; started by `python -m service`."""

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

LOG: Final = logging.getLogger("attnd.zmq")
NEEDS: Final = ("zmq", "msgspec")


def main(make_upstream: MakeUpstream = Link) -> int:
    """Publish until drained; the process's exit status."""
    inherited = receive()
    from service.logs import set_up_logs

    set_up_logs(inherited.settings.log, inherited.process)
    if not all(find_spec(name) for name in NEEDS):
        LOG.error("cannot start: cache.zmq_endpoint needs pyzmq: %s", how_to_install("zmq"))
        return CANNOT_START
    return publish(inherited, make_upstream)


def publish(inherited: Inherited, make_upstream: MakeUpstream) -> int:
    from service.doors.zmq.publisher import Publisher

    publisher = Publisher(
        inherited.settings,
        inherited.engine_socket,
        inherited.process,
        inherited.secret,
        make_upstream,
    )

    def watch(loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(inherited.lifeline, os._exit, 1)
        on_hang_up(lambda: None)  # its namespace is a setting, not a key's
        loop.add_signal_handler(signal.SIGTERM, publisher.drain)

    asyncio.run(publisher.serve(watch))
    if publisher.failed:
        LOG.error("cannot start: %s", publisher.failed)
        return CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
