"""`python -m service --cluster`: the cluster on Ray, in the one that is there or in a local one of
its own, until SIGTERM or SIGINT."""

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
"""Nothing goes through Ray's object store; this is the least it takes."""
QUIET: Final = {"log_level": "WARNING"}
"""Of Serve itself; engines and doors log as `log.level` says."""
SPARE_CPUS: Final = 2
"""Of a local Ray, beside those of its engines."""


def serve_cluster(settings: Settings) -> int:
    """Serve until told to stop; the exit status."""
    asked = threading.Event()
    start_ray(settings)
    for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's own
        signal.signal(number, lambda *_: asked.set())
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        app = application(settings)
        handle = serve.run(app, name="attnd", route_prefix=None, logging_config=QUIET)
        LOG.info("attnd %s starts, listening on %s", __version__, handle.url.remote().result())
        asked.wait()
        LOG.info("finishing admitted work")
        with suppress(RayError):  # then engines try to empty themselves first
            ray.get(directory().end.remote())
        serve.delete("attnd")
        ray.kill(directory())
        ignore_ray()
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    return 0


def ignore_ray() -> None:
    """Show nothing more of what Ray's processes write: of a cluster that ends on purpose they say
    that its actors have died, and will be asked again without end."""
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def start_ray(settings: Settings) -> None:
    """Join the Ray that is there, else start one for this process alone."""
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
