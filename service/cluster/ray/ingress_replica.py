"""The ingress as a replica of Ray Serve: it starts the doors on its node, and keeps the file of
members by which they know the engines.

The doors listen by themselves: a call does not go through Serve's proxy, nor through Ray.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Collection
from typing import Any, Final

import ray
from ray.exceptions import RayError

from config.settings import Settings
from service.addresses import bind_addresses
from service.cluster.membership.door_processes import start_doors
from service.cluster.membership.members_file import write_members
from service.cluster.ray.directory import REPORT_S, SILENT_S, Place, directory
from service.road.tcp import host_and_port

SETTLE_S: Final = 3 * REPORT_S
"""A directory that is new has heard of all engines that run by then."""
MOST_SETTLE_S: Final = 60.0
"""For so long an ingress that starts waits for `cluster.engines` of them."""
CONNECT_S: Final = 1.0
ENDING_S: Final = 5.0
"""Beyond server.drain_timeout_s, for doors to end by themselves."""


def is_refused(place: Place, node: str) -> bool:
    """Whether nobody listens where an engine did, so that it has ended; else nobody knows."""
    try:
        if place.node == node:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(place.path)
        else:
            socket.create_connection(host_and_port(place.address), CONNECT_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


class IngressReplica:
    """The doors of one node."""

    def __init__(self, settings: Settings, secret: str, engines: Any = None) -> None:
        """`engines` is Serve's handle; only that it is given makes it start them."""
        self.settings = settings
        self.addresses = bind_addresses(
            settings.server, is_private=settings.auth.is_private, num_engines=0
        )
        self.node = ray.get_runtime_context().get_node_id()
        self.known: dict[str, Place] = {}
        self.heard_s: dict[str, float] = {}
        self.began_s = time.monotonic()
        self.is_settled = False
        """All engines that there should be have been heard of, or were waited for."""
        write_members(self.addresses.members, [])
        self.lifeline, self.held = os.pipe()
        self.doors = start_doors(settings, self.addresses, secret, self.lifeline)
        self.directory = directory()
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    def url(self) -> str:
        """Where the doors serve."""
        return self.addresses.url

    async def watch(self) -> None:
        """Write down the engines there are whenever that changes."""
        while True:
            try:
                heard = await self.directory.read.remote()
                gone = await asyncio.to_thread(self.gone, heard, time.monotonic())
                self.take(heard, gone, time.monotonic())
            except RayError:  # no directory, so no engine is silent; those known stay
                self.heard_s = dict.fromkeys(self.known, time.monotonic())
            await asyncio.sleep(REPORT_S)

    def gone(self, heard: list[Place], now_s: float) -> set[str]:
        """The engines that are known to be no more, of those that nobody has heard of lately. An
        actor that only says nothing may have an engine that has all its sequences."""
        silent = self.known.keys() - {place.name for place in heard}
        silent = {
            name
            for name in silent
            if self.known[name].is_leaving or now_s - self.heard_s[name] > SILENT_S
        }
        if not silent:
            return set()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        taken = {place.address for place in heard} | {(place.node, place.path) for place in heard}
        return {
            name
            for name in silent
            if (place := self.known[name]).node not in alive
            or {place.address, (place.node, place.path)} & taken
            or is_refused(place, self.node)
        }

    def take(self, heard: list[Place], gone: Collection[str], now_s: float) -> None:
        """A directory that was started anew has not heard of all: an engine that is not there stays
        until it is known to be gone."""
        before = dict(self.known) if self.is_settled else None
        self.known |= {place.name: place for place in heard}
        self.heard_s |= {place.name: now_s for place in heard}
        names = {place.name for place in heard}
        for name in self.known.keys() - names:
            if name in gone:
                del self.known[name], self.heard_s[name]
        waited_s = now_s - self.began_s
        are_all = len(self.known) >= self.settings.cluster.engines and waited_s > SETTLE_S
        self.is_settled = self.is_settled or are_all or waited_s > MOST_SETTLE_S
        if self.is_settled and self.known != before:
            patience = self.settings.cluster.lost_after_s
            listed = [place.listed(self.node, patience) for place in self.known.values()]
            write_members(self.addresses.members, listed)

    def check_health(self) -> None:
        """Serve asks; raises RuntimeError where it should start the replica anew."""
        if self.watching.done():
            raise RuntimeError("nobody looks after the members any more")
        self.doors.check()

    async def __del__(self) -> None:
        """Let the doors finish what was admitted."""
        self.watching.cancel()
        await asyncio.to_thread(self.doors.end, self.settings.server.drain_timeout_s + ENDING_S)
        self.addresses.members.unlink(missing_ok=True)
        self.addresses.close()
