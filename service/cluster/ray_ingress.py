"""The ingress as a replica of Ray Serve: it starts the doors on its node, and keeps the file of
members by which they know the engines.

The doors listen by themselves: a call does not go through Serve's proxy, nor through Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Final

import ray
from ray.exceptions import RayError

from config.settings import Settings
from service.addresses import bind_addresses
from service.cluster.doors import start_doors
from service.cluster.listed import write_members
from service.cluster.ray_directory import REPORT_S, SILENT_S, Place, directory

ENDING_S: Final = 5.0
"""Beyond server.drain_timeout_s, for doors to end by themselves."""


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
                self.take(await self.directory.read.remote(), time.monotonic())
            except RayError:  # no directory, so no engine is silent; those known stay
                self.heard_s = dict.fromkeys(self.known, time.monotonic())
            await asyncio.sleep(REPORT_S)

    def take(self, heard: list[Place], now_s: float) -> None:
        """A directory that was started anew has not heard of all: who is not there stays, until it
        has been silent for too long, or has left."""
        before = dict(self.known)
        self.known |= {place.name: place for place in heard}
        self.heard_s |= {place.name: now_s for place in heard}
        names = {place.name for place in heard}
        for name in self.known.keys() - names:
            if self.known[name].is_leaving or now_s - self.heard_s[name] > SILENT_S:
                del self.known[name], self.heard_s[name]
        if self.known != before:
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
