"""From a call's image to a request that the engine can run; calls that repeat are read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from kernels.tensor import PinnedArray
from service.engine.place import Array, Place
from service.image.dtypes import BOOL
from service.image.reading import place, split
from service.operations.info import InfoAnswer
from service.operations.spec import Operation, Prepared, prepare
from service.road.calls import Call
from service.tenants import OPEN, Tenant

REMEMBERED_BYTES: Final = 16 * 2**10
"""Longest header that is remembered: bounds what 512 of them can hold."""
REPEATED_BYTES: Final = 2 * 2**10
MOST_REPEATED: Final = 128
"""A session's calls are remembered whole, places and all, up to so many with so long headers."""


@dataclass(slots=True, eq=False)
class Request:
    """A checked operation, its tensors in place, where its answer goes, and whose it is.

    Sequences in its fields are called what the tree calls them, see `Tenant`. It may serve again,
    when a session sends the same header from the same place for an answer at the same place and for
    the same tenant. `known` is what an operation works out from the header alone.
    """

    operation: Operation
    fields: Any
    tensors: dict[str, Array]
    place: Place
    tenant: Tenant = OPEN
    known: dict[str, Any] = field(default_factory=dict)
    step: Any = None
    """A step's lane: `StepPlace`."""


class RequestReader:
    """Reads images for one engine, whose `info` the checks rest on."""

    def __init__(self, info: InfoAnswer) -> None:
        def read(operation: Operation, header: bytes, room: int, tenant: Tenant) -> Prepared:
            return prepare(operation, header, room, info, tenant)

        self._read = read
        self._remember = lru_cache(maxsize=512)(read)
        self._limit = info.limits.max_answer_bytes

    def read(self, operation: Operation, call: Call) -> Request:
        """Raises `Forbidden`, `MalformedBody`, `InvalidRequest`.

        The header is copied before it is read: its writer may still be at it. Tensors are read
        where they lie.
        """
        header, start = split(call.request)
        repeated = call.session.repeated
        tenant = call.tenant
        key = (operation.number, call.at, header, tenant)
        request: Request | None = repeated.get(key)
        if request is not None:
            return request
        image, pinned = call.request, call.session.pinned
        read = self._remember if len(header) <= REMEMBERED_BYTES else self._read
        prepared = read(operation, header, len(image) - start, tenant)
        tensors = place(image, start, prepared.layout)
        serves_again = len(header) <= REPEATED_BYTES and lie_still(tensors)
        if pinned:
            tensors = {name: array.view(PinnedArray) for name, array in tensors.items()}
        answer = Place(call.answer, self._limit, pinned)
        request = Request(operation, prepared.fields, tensors, answer, tenant)
        if serves_again:
            if len(repeated) >= MOST_REPEATED:
                repeated.clear()
            repeated[key] = request
        return request


def lie_still(tensors: Mapping[str, Array]) -> bool:
    """Whether tensors are the arena's own bytes, with nothing in them to be checked."""
    return all(one.base is not None and one.dtype != BOOL for one in tensors.values())
