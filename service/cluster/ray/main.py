"""`python -m service --cluster`: the cluster on a running Ray, or on a local one of its own, until
SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress
from typing import Final

import ray
from ray import serve
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import RayError

from config.settings import Settings
from service import __version__
from service.cluster.ray.app import application
from service.cluster.ray.directory import directory

LOG: Final = logging.getLogger("attnd.cluster")
STORE_BYTES: Final = 80 * 2**20
"""Size of Ray's object store, which is not used: Ray's minimum."""
QUIET: Final = {"log_level": "WARNING"}
"""Serve's own logging; engines and doors log at `log.level`."""
SPARE_CPUS: Final = 2
"""CPUs of a local Ray, beside one per engine."""


def serve_cluster(settings: Settings) -> int:
    """Serves until a signal to stop; returns the exit status."""
    stop = threading.Event()
    start_ray(settings)
    for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's own
        signal.signal(number, lambda *_: stop.set())
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        app = application(settings)
        handle = serve.run(app, name="attnd", route_prefix=None, logging_config=QUIET)
        LOG.info("attnd %s starts, listening on %s", __version__, handle.url.remote().result())
        stop.wait()
        LOG.info("finishing accepted requests")
        with suppress(RayError):  # without it engines would be drained first
            ray.get(directory().end.remote())
        serve.delete("attnd")
        ray.kill(directory())
        ignore_ray()
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    return 0


def ignore_ray() -> None:
    """Hides the output of Ray's processes, which report the deaths of actors as the cluster
    stops."""
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def start_ray(settings: Settings) -> None:
    """Joins a running Ray, else starts one for this process alone."""
    try:
        ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    except ConnectionError:
        most = max(settings.cluster.engines, settings.cluster.max_engines or 0)
        ray.init(
            num_cpus=most + SPARE_CPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
