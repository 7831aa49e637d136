"""The router's events for the ZeroMQ process of its service, over a Unix socket beside the roster
that only their user can open. A connection asks for one page: `NAMESPACE NUMBER`, a line."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Final

from config.sections import Settings
from service.doors.kit.problems import ProblemText
from service.doors.kit.upstream import Upstream, events_after
from service.errors import AttndError
from service.image.json_text import dump_json
from service.road.engine_end.listening import bind
from service.tenants import OPEN, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.cluster")
ONLY_ITS_USER: Final = 0o600


def path_beside(roster: str) -> Path:
    return Path(roster).with_suffix(".events")


async def serve_events(router: Upstream, has_keys: bool, roster: str) -> asyncio.Server:
    """Serves pages from now on; a page that cannot be had is an empty reply. Raises OSError."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            namespace, last = (await reader.readline()).decode().split()
            tenant = tenant_of(namespace, ("read",)) if has_keys else OPEN
            writer.write(dump_json(await events_after(router, tenant, int(last))).encode())
            await writer.drain()
        except (AttndError, ProblemText, OSError, ValueError) as error:
            LOG.debug("no events for the ZeroMQ process: %s", error)
        finally:
            writer.close()

    path = path_beside(roster)
    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(reply, sock=bind(path, ONLY_ITS_USER))


class RouterEvents:
    """The source of the ZeroMQ process in a cluster. Routers may end and start again."""

    def __init__(self, settings: Settings, has_keys: bool) -> None:
        self.path = Path()

    async def connect(self, path: str, name: str, secret: str) -> None:
        self.path = path_beside(path)

    async def after(self, tenant: Tenant, last: int) -> dict[str, Any]:
        """As `EventSource.after`. Raises OSError and ValueError where no router replies."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(f"{tenant.namespace} {last}\n".encode())
            page: dict[str, Any] = json.loads(await reader.read())
            return page
        finally:
            writer.close()

    def close(self) -> None:
        """Nothing: connections end with their page."""
