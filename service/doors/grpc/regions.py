"""The gRPC door's methods for shared memory of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from service.doors.oip.memory import ON_DEVICE, Memories, no_region
from service.doors.oip.region_table import Region
from service.errors import NotSupported
from service.tenants import Tenant

OP: Final = "regions"


class RegionPages:
    """The methods, over what one door knows of them."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories

    def pages(self) -> dict[str, tuple[str, Callable[[Any, Tenant], Any]]]:
        """By name: what logs call it, and what it answers."""
        answers = {
            "SystemSharedMemoryStatus": self.status,
            "SystemSharedMemoryRegister": self.register,
            "SystemSharedMemoryUnregister": self.unregister,
            "CudaSharedMemoryStatus": self.on_device,
            "CudaSharedMemoryRegister": self.register_on_device,
            "CudaSharedMemoryUnregister": self.on_device,
        }
        return {name: (OP, answer) for name, answer in answers.items()}

    def status(self, request: Any, tenant: Tenant) -> Any:
        found = self.memories.status(tenant, request.name)
        return {"regions": {one["name"]: one for one in found}}

    def register(self, request: Any, tenant: Tenant) -> Any:
        region = Region(request.key, request.offset, request.byte_size)
        self.memories.register(tenant, request.name, region)
        return {}

    def unregister(self, request: Any, tenant: Tenant) -> Any:
        self.memories.unregister(tenant, request.name)
        return {}

    def on_device(self, request: Any, tenant: Tenant) -> Any:
        """There are no regions there."""
        if request.name:
            raise no_region(request.name)
        return {}

    def register_on_device(self, request: Any, tenant: Tenant) -> Any:
        raise NotSupported(ON_DEVICE)
