"""The ingress as a replica of Ray Serve: starts the doors on its node, and writes the members file
that they read.

The doors listen by themselves: calls pass neither through Serve's proxy nor through Ray.
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
from service.cluster.membership.members_file import write_members
from service.cluster.membership.processes import start_doors
from service.cluster.ray.directory import REPORT_S, SILENT_S, Place, directory
from service.road.tcp import host_and_port

SETTLE_S: Final = 3 * REPORT_S
"""By then all running engines have reported to a new directory."""
MAX_SETTLE_S: Final = 60.0
"""Maximum time that a new ingress waits for `cluster.engines` of them."""
CONNECT_S: Final = 1.0
ENDING_S: Final = 5.0
"""Time for doors to end, beyond server.drain_timeout_s."""


def is_refused(place: Place, node: str) -> bool:
    """Whether an engine's address refuses connections, so that the engine has ended."""
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
        """`engines` is Serve's handle: passing it makes Serve start the engines."""
        self.settings = settings
        self.addresses = bind_addresses(
            settings.server, is_private=settings.auth.is_private, num_engines=0
        )
        self.node = ray.get_runtime_context().get_node_id()
        self.known: dict[str, Place] = {}
        self.seen_s: dict[str, float] = {}
        self.began_s = time.monotonic()
        self.is_settled = False
        """All configured engines have reported, or were waited for."""
        write_members(self.addresses.members, [])
        self.lifeline, self.held = os.pipe()
        self.doors = start_doors(settings, self.addresses, secret, self.lifeline)
        self.directory = directory()
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    def url(self) -> str:
        return self.addresses.url

    async def watch(self) -> None:
        """Writes the members file whenever the engines change."""
        while True:
            try:
                places = await self.directory.read.remote()
                ended = await asyncio.to_thread(self.ended, places, time.monotonic())
                self.update(places, ended, time.monotonic())
            except RayError:  # without a directory no engine counts as silent
                self.seen_s = dict.fromkeys(self.known, time.monotonic())
            await asyncio.sleep(REPORT_S)

    def ended(self, places: list[Place], now_s: float) -> set[str]:
        """The silent engines that have provably ended. A silent actor may still have an engine with
        all its sequences."""
        silent = self.known.keys() - {place.name for place in places}
        silent = {
            name
            for name in silent
            if self.known[name].is_leaving or now_s - self.seen_s[name] > SILENT_S
        }
        if not silent:
            return set()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        taken = {place.address for place in places} | {(place.node, place.path) for place in places}
        return {
            name
            for name in silent
            if (place := self.known[name]).node not in alive
            or {place.address, (place.node, place.path)} & taken
            or is_refused(place, self.node)
        }

    def update(self, places: list[Place], ended: Collection[str], now_s: float) -> None:
        """Adds reported engines and removes ended ones. An engine that is missing in
        a restarted directory stays."""
        before = dict(self.known) if self.is_settled else None
        self.known |= {place.name: place for place in places}
        self.seen_s |= {place.name: now_s for place in places}
        names = {place.name for place in places}
        for name in self.known.keys() - names:
            if name in ended:
                del self.known[name], self.seen_s[name]
        waited_s = now_s - self.began_s
        are_all = len(self.known) >= self.settings.cluster.engines and waited_s > SETTLE_S
        self.is_settled = self.is_settled or are_all or waited_s > MAX_SETTLE_S
        if self.is_settled and self.known != before:
            lost_after_s = self.settings.cluster.lost_after_s
            entries = [place.entry(self.node, lost_after_s) for place in self.known.values()]
            write_members(self.addresses.members, entries)

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError where Serve should restart the replica."""
        if self.watching.done():
            raise RuntimeError("the members file is not updated any more")
        self.doors.check()

    async def __del__(self) -> None:
        """Called by Serve at the end: lets the doors finish accepted requests."""
        self.watching.cancel()
        await asyncio.to_thread(self.doors.end, self.settings.server.drain_timeout_s + ENDING_S)
        self.addresses.members.unlink(missing_ok=True)
        self.addresses.close()
