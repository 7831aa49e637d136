"""`python -m service`: settings, addresses, and the supervisor of engine and doors until they end.
`python -m service key` makes keys; `python -m service gateway --attnd URL` is a gateway to a
service elsewhere.

Nothing here imports torch, numpy or HTTP: this process only watches.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from config.settings import Settings, SettingsError, load_settings, set_environment
from service import __version__
from service.addresses import Addresses, bind_addresses
from service.cluster.membership.roster import engine_name, list_engines
from service.doors.kit.tls import TlsError
from service.extras import how_to_install
from service.keys import KeysError, key_command, secret_of
from service.launch import HOME, command_of, hold_hang_ups
from service.logs import set_up_logs
from service.processes.cells import make_shared
from service.processes.handover import CheckedFiles, Child, Shared
from service.road.engine_end.listening import CannotListen
from service.supervisor import ENGINE, MAIN, Supervisor

LOG: Final = logging.getLogger("attnd")
GATEWAY: Final = "oip-0"
OTHER_FILES: Final = 256
"""Open files of a process beside its connections: libraries, devices, arenas, pipes."""
LEAST_FILES: Final = 64
"""Open files without which a process cannot start."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of the processes; `service/processes/handover.py` has their protocol."""

    engine: tuple[str, ...] = command_of("service.engine")
    door: tuple[str, ...] = (*command_of("service.doors"), "http")
    gateway: tuple[str, ...] = command_of("service.gateway")
    zmq: tuple[str, ...] = (*command_of("service.doors"), "zmq")


CLUSTER_DOOR: Final = command_of("service.cluster")
IN_CLUSTER: Final = Commands(door=(*CLUSTER_DOOR, "http"), zmq=(*CLUSTER_DOOR, "zmq"))
"""Doors with several engines behind them."""


def main(argv: Sequence[str], commands: Commands | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the service's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while nothing runs yet
    hold_hang_ups()
    open_standard_streams()
    if argv[:1] == ["key"]:
        return key_command(argv[1:])
    on_ray = "--cluster" in argv
    argv = [one for one in argv if one != "--cluster"]
    url = ""
    if argv[:1] == ["gateway"]:
        url, argv = gateway_url(argv[1:])
    if "--version" in argv:
        print(f"attnd {__version__}")
        return 0
    set_environment("torch", "grpc")
    try:
        settings = load_settings(argv)
    except SettingsError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2
    set_up_logs(settings.log, "main")
    if url:
        return serve_gateway(settings, url, commands or Commands())
    if on_ray:
        return cluster_on_ray(settings)
    try:
        allow_open_files(settings)
        files = CheckedFiles(settings)
        secret = secret_of(settings.server.secret_file)
    except KeysError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2
    except (TlsError, OSError) as error:
        LOG.error("cannot start: %s", error)
        return 1
    try:
        addresses = bind_addresses(
            settings.server,
            is_private=settings.auth.is_private,
            num_engines=settings.cluster.engines,
        )
    except CannotListen as error:
        LOG.error("cannot listen: %s", error)
        return 1
    with ExitStack() as bound:
        bound.callback(addresses.close)
        try:
            # closed once: a path may be another service's by the time this one has ended
            usual = Commands() if settings.cluster.is_one else IN_CLUSTER
            return supervise(settings, addresses, bound.close, commands or usual, files, secret)
        except OSError as error:
            LOG.error("cannot start the processes: %s", error)
            return 1


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed: the next files would get their
    numbers, and other processes would take them for streams."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def cluster_on_ray(settings: Settings) -> int:
    """Hand over to Ray, which is an extra."""
    if find_spec("ray") is None:
        LOG.error("cannot start: --cluster needs Ray: %s", how_to_install("ray"))
        return 1
    if settings.server.http_workers > 1:
        LOG.error("cannot start: server.http_workers: a cluster has one router: leave it out")
        return 2
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    set_environment("ray")
    from service.cluster.ray.app import serve_cluster

    settings = settings.with_absolute_paths()
    os.chdir(HOME)  # Ray's workers import from the working directory of their driver first
    return serve_cluster(settings)


def supervise(
    settings: Settings,
    addresses: Addresses,
    stop_listening: Callable[[], None],
    commands: Commands,
    files: CheckedFiles,
    secret: str,
    metrics: Mapping[str, int] | None = None,
) -> int:
    """Start engine and doors on their sockets, and watch them to the end. Without sockets of
    engines these are the doors of one elsewhere, which listens at `addresses.roster` and counts in
    `metrics`."""
    paths = [one.path for one in addresses.engines]
    is_one = settings.cluster.is_one
    called = paths[0] if paths and is_one else addresses.roster
    if not is_one:
        list_engines(called, paths)
    children = []
    for number, one in enumerate(addresses.engines):
        name = ENGINE if is_one else engine_name(number)
        children.append(Child(name, commands.engine, (one.sock,), number))
    for worker in range(settings.server.http_workers):
        children.append(Child(f"http-{worker}", commands.door, addresses.http, worker))
    if settings.oip.is_on:
        elsewhere = () if is_one else ("--attnd", addresses.url)
        children.append(Child(GATEWAY, (*commands.gateway, *elsewhere), ()))
    if settings.cache.zmq_endpoint is not None:
        children.append(Child("zmq-0", commands.zmq, ()))
    lifeline, held = os.pipe()  # `held` closes with this process
    shared = Shared(
        settings=settings,
        lifeline=lifeline,
        engine_socket=str(called),
        url=addresses.url,
        secret=secret,
        metrics={name: make_shared() for name in (MAIN, *(child.process for child in children))}
        | dict(metrics or {}),
        files=files,
    )
    docs = " (API at /docs)" if addresses.uds is None else ""
    LOG.info("attnd %s starts, listening on %s%s", __version__, addresses.url, docs)
    if paths:
        LOG.info("sessions at %s", ", ".join(map(str, paths)))
    try:
        return Supervisor(children, shared, stop_listening).run()
    finally:
        if not is_one:
            called.unlink(missing_ok=True)
        for fd in (held, *shared.descriptors):
            os.close(fd)


def gateway_url(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The service's URL of `attnd gateway`, and its settings; exits where there is no URL."""
    parser = argparse.ArgumentParser("attnd gateway", allow_abbrev=False, add_help=False)
    parser.add_argument("--attnd", required=True, metavar="URL")
    found, settings = parser.parse_known_args(argv)
    return found.attnd, settings


def serve_gateway(settings: Settings, url: str, commands: Commands) -> int:
    """Serve the Open Inference Protocol in front of a service elsewhere."""
    if not settings.oip.is_on:
        LOG.error("cannot start: a gateway has --oip.http-port, --oip.grpc-port, or both")
        return 2
    try:
        files = CheckedFiles(settings)
    except (KeysError, TlsError, OSError) as error:
        LOG.error("cannot start: %s", error)
        return 1
    child = Child(GATEWAY, (*commands.gateway, "--attnd", url), ())
    lifeline, held = os.pipe()
    shared = Shared(
        settings=settings,
        lifeline=lifeline,
        engine_socket="",
        url=url,
        secret="",
        metrics={name: make_shared() for name in (MAIN, GATEWAY)},
        files=files,
    )
    LOG.info("attnd %s starts a gateway to %s", __version__, url)
    try:
        return Supervisor([child], shared, lambda: None).run()
    finally:
        for fd in (held, *shared.descriptors):
            os.close(fd)


def allow_open_files(settings: Settings) -> None:
    """Raise the soft limit of open files, which the processes inherit, to their needs. Raises
    OSError where a process could not start with them."""
    server = settings.server
    needed = max(server.max_connections, 3 * server.max_sessions) + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if allowed < LEAST_FILES:
            raise OSError(
                f"at most {allowed} files may be open, each needs {LEAST_FILES} or more: raise the "
                "limit (ulimit -n, LimitNOFILE of systemd)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            text = "at most %d files may be open, server.max_connections = %d may need %d"
            LOG.warning(text, allowed, server.max_connections, needed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
