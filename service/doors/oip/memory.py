"""Shared memory of clients as a door sees it: whose regions are which, and what lies in them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any, Final

from config.server import ServerSettings
from service.doors.oip.models import Model
from service.doors.oip.region_table import Region, Regions, RegionTable
from service.doors.oip.request import MAX_BYTES, REGION, REGION_OFFSET, Input, InRegion
from service.doors.oip.shared_object import Opened, SharedObject, Span, name_of
from service.errors import InvalidRequest, NoSuchRoute, NotSupported
from service.image.dtypes import DType
from service.tenants import OPEN, Tenant

NAME: Final = re.compile(r"[!-.0-~]{1,128}")
"""Of a region: printable ASCII without a slash."""
KEY_RULE: Final = "must name an object in /dev/shm: 1 to 200 printable characters, no slash inside"
SWITCHED_OFF: Final = (
    "this service reads no shared memory of clients: send tensors as binary data, or set "
    "server.client_shm"
)
ON_DEVICE: Final = (
    "regions in device memory are not served: a client could free one while the device reads it; "
    "put tensors into system shared memory, or run steps in a device session"
)


class ClientMemory:
    """One caller's, during a request: `regions` None where the service has this switched off."""

    __slots__ = ("owners", "regions")

    def __init__(self, regions: Regions | None, owners: Collection[int]) -> None:
        self.regions = regions
        self.owners = owners

    def span(self, place: InRegion) -> Span:
        """Where a tensor lies. Raises NotSupported, NoSuchRoute, InvalidRequest."""
        if self.regions is None:
            raise NotSupported(SWITCHED_OFF)
        region = self.regions.get(place.region)
        if region is None:
            raise no_region(place.region)
        if place.offset + place.size > region.size:
            rule = f"{place.size} bytes from there: region {place.region} has {region.size}"
            raise InvalidRequest(f"{place.name}.{REGION_OFFSET}", place.offset, rule)
        field, name = f"{place.name}.{REGION}", region.key.removeprefix("/")
        return Span(field, name, region.offset + place.offset, place.size)

    def opened(self) -> Opened:
        """None yet."""
        return Opened(self.owners)

    def input(self, model: Model, dtype: DType, shape: tuple[int, ...], place: InRegion) -> Input:
        """The input that lies in a region. One that becomes a field is read here."""
        if place.name not in model.list_fields:
            return Input(place.name, dtype, shape, b"", place=place)
        data = bytearray(place.size)
        span = self.span(place)
        with closing(self.opened()) as opened:
            opened.of(span).read(span, memoryview(data))
        return Input(place.name, dtype, shape, bytes(data))


class Memories:
    """One door's. `table` None: the service has this switched off."""

    def __init__(self, limits: ServerSettings, fd: int | None) -> None:
        """`fd` is the table that the doors share."""
        self.limits = limits
        self.table = None if fd is None or not limits.client_shm else RegionTable(fd)
        self.owners = frozenset({os.geteuid(), *limits.socket_uids})
        self.switched_off = ClientMemory(None, self.owners)

    def of(self, tenant: Tenant) -> ClientMemory:
        if self.table is None:
            return self.switched_off
        return ClientMemory(self.table.of(tenant.namespace), self.owners)

    def status(self, tenant: Tenant, name: str = "") -> list[dict[str, Any]]:
        """What is registered, or one of it. Raises NotSupported, NoSuchRoute."""
        regions = self.shared.of(tenant.namespace)
        chosen: Mapping[str, Region] = regions
        if name:
            if name not in regions:
                raise no_region(name)
            chosen = {name: regions[name]}
        return [
            {"name": one, "key": region.key, "offset": region.offset, "byte_size": region.size}
            for one, region in chosen.items()
        ]

    def register(self, tenant: Tenant, name: str, region: Region) -> None:
        """Raises NotSupported, InvalidRequest; then nothing is registered."""
        table = self.shared
        if not NAME.fullmatch(name):
            raise InvalidRequest("name", name, "must be 1 to 128 printable characters, no slash")
        check_region(tenant, region)
        span = Span("key", name_of(region.key) or "", region.offset, region.size)
        SharedObject(span, self.owners).close()
        with table.changing(tenant.namespace) as regions:
            if name in regions:
                raise InvalidRequest("name", name, "is registered already: unregister it first")
            if len(regions) >= self.limits.client_shm_regions:
                rule = "unregister some, or raise server.client_shm_regions"
                raise InvalidRequest("name", name, f"{len(regions)} are registered: {rule}")
            regions[name] = region

    def unregister(self, tenant: Tenant, name: str = "") -> None:
        """One, or without a name all. Raises NotSupported, NoSuchRoute."""
        with self.shared.changing(tenant.namespace) as regions:
            if name and name not in regions:
                raise no_region(name)
            for one in [name] if name else list(regions):
                del regions[one]

    def check(self) -> None:
        """Raises NotSupported where this is switched off."""
        _ = self.shared

    @property
    def shared(self) -> RegionTable:
        if self.table is None:
            raise NotSupported(SWITCHED_OFF)
        return self.table

    def close(self) -> None:
        if self.table is not None:
            self.table.close()


def check_region(tenant: Tenant, region: Region) -> None:
    """The rules of a region by itself. Raises InvalidRequest."""
    name = name_of(region.key)
    if name is None:
        raise InvalidRequest("key", region.key, KEY_RULE)
    if tenant is not OPEN and not name.startswith(f"{tenant.namespace}:"):
        rule = f"must begin with {tenant.namespace}: and no other namespace reaches it then"
        raise InvalidRequest("key", region.key, rule)
    if not 0 < region.size < MAX_BYTES:
        raise InvalidRequest("byte_size", region.size, "must be at least 1")
    if not 0 <= region.offset < MAX_BYTES:
        raise InvalidRequest("offset", region.offset, "must be a count of bytes")


def no_region(name: str) -> NoSuchRoute:
    return NoSuchRoute(f"no region {name[:100]!r} is registered: register it first")
