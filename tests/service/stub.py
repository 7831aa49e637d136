"""A process that takes over from the supervisor as engine and doors do, and then does as its first
argument says; the tests of the supervisor start it in their place."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time

from service.logs import set_up_logs
from service.processes.handover import CANNOT_START, Inherited, receive

LOG = logging.getLogger("attnd.stub")


def main(behaviour: str, arguments: list[str]) -> int:
    if behaviour == "die":
        return 7
    inherited = receive(arguments)
    set_up_logs(inherited.settings.log, inherited.process)
    if behaviour == "refuse":
        LOG.error("no such device")
        return CANNOT_START
    stopped, stop = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"."))
    if behaviour == "have a helper":
        helper = subprocess.Popen("cat", stdin=subprocess.PIPE)  # ends with this process
        LOG.info("a helper", extra={"fields": {"pid": helper.pid}})
    LOG.info("up", extra={"fields": facts(inherited)})
    while True:
        ready = select.select([inherited.lifeline, stopped], [], [])[0]
        if inherited.lifeline in ready:
            os._exit(1)
        if behaviour == "crash at the end":
            os.abort()
        if behaviour == "work on for a while":
            time.sleep(0.5)
        if behaviour != "never stop":
            return 0
        os.read(stopped, 1)


def facts(inherited: Inherited) -> dict[str, object]:
    """The facts that tests check."""
    return {
        "pid": os.getpid(),
        "worker": inherited.worker,
        "url": inherited.url,
        "engine_socket": inherited.engine_socket,
        "sockets": [str(one.getsockname()) for one in inherited.sockets],
        "blocking": [one.getblocking() for one in inherited.sockets],
        "num_pages": inherited.settings.pool.num_pages,
        "metrics": sorted(inherited.metrics),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
