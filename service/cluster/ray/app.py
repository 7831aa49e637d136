"""The cluster as an application of Ray Serve: `serve run service.cluster.ray.app:build`."""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from ray import serve
from ray._private import worker
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.deployment import Application

from config.settings import Settings, load_settings
from service import __version__
from service.cluster.placement.cost import EngineLoad, spread
from service.cluster.ray.engine_replica import APP, REPLY_S, ROUTER, EngineReplica
from service.cluster.ray.router_replica import REPORT_S, RouterReplica
from service.supervisor import GRACE_S

HEALTH_CHECK_S: Final = 2.0
MAX_SILENT_S: Final = 600.0
"""Serve kills an engine, with all its sequences, whose actor has not replied for so long. The death
of an actor is seen at once."""
LEAVING_S: Final = GRACE_S + 3 * REPLY_S
"""Time of an engine beyond its drains: to report that it leaves, and to write to its disk."""
SECRET_BYTES: Final = 32
LOAD: Final = ("free", "cached", "held", "queue_s")


def build(arguments: Mapping[str, object] | None = None) -> Application:
    """The application, with settings from a file, the environment, and arguments such as
    `pool.num-pages=4096`. Raises SettingsError."""
    given = [
        text for name, value in (arguments or {}).items() for text in (f"--{name}", str(value))
    ]
    return application(load_settings(given))


def application(settings: Settings) -> Application:
    cluster = settings.cluster
    secret = secrets.token_hex(SECRET_BYTES)
    engine = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if settings.backend.kind == "cuda" else 0},
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=MAX_SILENT_S,
        graceful_shutdown_timeout_s=cluster.drain_s + settings.server.drain_timeout_s + LEAVING_S,
        **scaling(settings),
    )(EngineReplica)
    resource = cluster.ingress_resource
    resources = {} if resource is None else {resource: 0.01}
    router = serve.deployment(
        name=ROUTER,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": resources},
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s + 10.0,
    )(RouterReplica)
    return router.bind(settings, secret, engine.bind(settings, secret))


def scaling(settings: Settings) -> dict[str, Any]:
    """A fixed number of engines, or autoscaling between bounds."""
    cluster = settings.cluster
    if cluster.max_engines is None:
        return {"num_replicas": cluster.engines}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=Policy,
        policy_kwargs={"least_free": cluster.least_free, "most_queue_s": cluster.most_queue_s},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.engines,
            max_replicas=cluster.max_engines,
            upscale_delay_s=cluster.grow_after_s,
            downscale_delay_s=cluster.shrink_after_s,
            metrics_interval_s=1.0,
            look_back_period_s=2.0,
            policy=policy,
        )
    }


class Policy:
    """Serve's autoscaling by free pages and queue time."""

    def __init__(self, least_free: float, most_queue_s: float) -> None:
        self.least_free = least_free
        self.most_queue_s = most_queue_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        known = set.intersection(*(set(metrics.get(name, {})) for name in LOAD))
        loads = [load_of({name: metrics[name][one] for name in LOAD}) for one in known]
        if len(loads) < context.current_num_replicas:  # wait for engines that are starting
            return context.target_num_replicas, {}
        return spread(loads, self.least_free, self.most_queue_s), {}


def load_of(means: Mapping[str, float]) -> EngineLoad:
    """A load from Serve's means of a replica's reports."""
    return EngineLoad(
        int(means["free"]), int(means["cached"]), int(means["held"]), means["queue_s"]
    )


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
        handle = serve.run(app, name=APP, route_prefix=None, logging_config=QUIET)
        LOG.info("attnd %s starts, listening on %s", __version__, handle.url.remote().result())
        stop.wait()
        LOG.info("finishing accepted requests")
        with suppress(RayError):  # without it engines would be drained first
            handle.end.remote().result()
            time.sleep(3 * REPORT_S)  # until all engines have heard of it
        serve.delete(APP)
        worker._worker_logs_enabled = False  # Ray reports the deaths of actors as it stops
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    return 0


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
