"""The engine process: settings, backend, loop; started by `python -m service`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from contextlib import ExitStack
from typing import Final

from config.settings import set_cupy_cache, set_environment
from service.processes.handover import CANNOT_START, Inherited, on_hang_up, receive

LOG: Final = logging.getLogger("attnd.engine")
NO_FULL_COLLECTION: Final = 2**31 - 1
"""Young objects are collected so often before all are: never. That would stop everybody, half a
second for 200,000 cached nodes, and find nothing: what calls and sessions leave behind goes with
its last reference."""


def main() -> int:
    """Serve until drained; the process's exit status."""
    inherited = receive()
    set_environment("torch", "cuda")
    from service.logs import set_up_logs

    set_up_logs(inherited.settings.log, inherited.process)
    return serve(inherited)


def serve(inherited: Inherited) -> int:
    """Make the backend, then the engine, and run it."""
    from service.engine.loop.engine import Engine
    from service.engine.store.setup import opened
    from service.engine.store.store import FATAL
    from service.logs import count_dropped
    from service.metrics import Metrics

    metrics = Metrics(inherited.process, inherited.metrics)
    count_dropped(metrics.log_lines_dropped)
    with ExitStack() as stack:
        try:
            if inherited.settings.backend.kind != "cpu":
                set_cupy_cache()
            settings, backend = stack.enter_context(opened(inherited.settings, inherited.worker))
            own, *remote = inherited.sockets
            entry = remote[0] if remote else None
            engine = Engine(
                own, settings, backend, metrics, inherited.secret, entry, inherited.read_file
            )
        except Exception as error:
            LOG.error("cannot start: %s", error)
            LOG.debug("the start failed here:", exc_info=error)
            return CANNOT_START
        signal.signal(signal.SIGTERM, lambda *_: engine.drain())
        on_hang_up(engine.read_keys_again)
        engine.watch(inherited.lifeline, lambda: os._exit(1))
        gc.collect()
        gc.freeze()  # later collections skip the objects made so far
        gc.set_threshold(*gc.get_threshold()[:2], NO_FULL_COLLECTION)
        try:
            engine.run()
        except FATAL:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
