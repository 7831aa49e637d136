"""The HTTP door's endpoints for shared memory of clients (Open Inference Protocol v2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from service.doors.http.answering import EXCHANGE, read_body
from service.doors.http.exchange import Exchange
from service.doors.http.models import page, told
from service.doors.oip.memory import ON_DEVICE, no_region
from service.doors.oip.region_table import Region
from service.doors.oip.request import refuse_keys
from service.errors import InvalidRequest, MalformedBody, NotSupported
from service.image.json_text import load_json

if TYPE_CHECKING:
    from service.doors.http.door import Door

SYSTEM: Final = "/v2/systemsharedmemory"
DEVICE: Final = "/v2/cudasharedmemory"
NAMED: Final = "/region/{name}"
OP: Final = "regions"
MOST_BYTES: Final = 16 * 2**10
"""Of a request to register."""
KEYS: Final = frozenset({"key", "offset", "byte_size"})


class RegionPages:
    """The endpoints, over one door."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.memories = door.memories

    def routes(self) -> list[BaseRoute]:
        found: list[BaseRoute] = [
            page(f"{SYSTEM}{NAMED}/register", self.register, OP, "POST"),
            page(f"{DEVICE}{NAMED}/register", self.register_on_device, OP, "POST"),
        ]
        for named in ("", NAMED):
            found += [
                page(f"{SYSTEM}{named}/status", self.status, OP),
                page(f"{SYSTEM}{named}/unregister", self.unregister, OP, "POST"),
                page(f"{DEVICE}{named}/status", self.status_on_device, OP),
                page(f"{DEVICE}{named}/unregister", self.unregister_on_device, OP, "POST"),
            ]
        return found

    async def status(self, request: Request) -> Response:
        return told(self.memories.status(exchange_of(request).tenant, name_in(request)))

    async def unregister(self, request: Request) -> Response:
        self.memories.unregister(exchange_of(request).tenant, name_in(request))
        return told({})

    async def register(self, request: Request) -> Response:
        exchange = exchange_of(request)
        self.memories.check()
        region = await self.read_region(exchange)
        self.memories.register(exchange.tenant, name_in(request), region)
        return told({})

    async def read_region(self, exchange: Exchange) -> Region:
        """What is to be registered. Raises MalformedBody, InvalidRequest."""
        exchange.check_encoding()
        slot, length = await read_body(self.door, exchange, MOST_BYTES)
        text = b"" if slot is None else bytes(slot.view(length))
        given = load_json(text, "the request")
        if not isinstance(given, dict):
            raise MalformedBody("the request is not a JSON object")
        refuse_keys("", given, KEYS)
        key, offset = given.get("key"), given.get("offset", 0)
        if not isinstance(key, str):
            raise InvalidRequest("key", key, "must be the name of a shared memory object")
        size: Any = given.get("byte_size")
        for field, value in (("offset", offset), ("byte_size", size)):
            if type(value) is not int:
                raise InvalidRequest(field, value, "must be a count of bytes")
        return Region(key, offset, size)

    async def status_on_device(self, request: Request) -> Response:
        refuse_name(request)
        return told([])

    async def unregister_on_device(self, request: Request) -> Response:
        refuse_name(request)
        return told({})

    async def register_on_device(self, request: Request) -> Response:
        raise NotSupported(ON_DEVICE)


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


def name_in(request: Request) -> str:
    """The region that the path names, empty for none."""
    name: str = request.path_params.get("name", "")
    return name


def refuse_name(request: Request) -> None:
    """There are no regions on a device."""
    if name := name_in(request):
        raise no_region(name)
