"""Reads calls' images into requests; a header that repeats is checked once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from attnd.wire.dtypes import BOOL

from kernels.tensor import PinnedArray
from service.engine.work.request import AnswerPlace, Request
from service.image.json_text import weight_of
from service.image.reading import place, split
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.spec import Operation, Prepared, prepare
from service.road.engine_end.calls import Call
from service.tenants import Tenant

REMEMBERED_BYTES: Final = 16 * 2**10
MOST_REMEMBERED: Final = 512
REMEMBERED_WEIGHT: Final = 64 * 2**20
"""Limits for headers that are remembered: size, number, and the memory of all of them."""
REPEATED_BYTES: Final = 2 * 2**10
MOST_REPEATED: Final = 128
REPEATED_WEIGHT: Final = 32 * 2**10
"""Limits for whole requests that a session remembers with their places: header size, number, and
the memory of each."""

Header = tuple[int, bytes, int, Tenant]
"""An operation's number, a header of its requests, the bytes of tensors behind it, and a tenant."""


class RequestReader:
    """Reads images for one engine, whose `info` the checks rest on."""

    def __init__(self, info: InfoAnswer) -> None:
        self._info = info
        self._known: OrderedDict[Header, Prepared] = OrderedDict()
        self._weight = 0
        """Of all that is known."""
        self._limit = info.limits.max_answer_bytes

    def read(self, operation: Operation, call: Call) -> Request:
        """The request of a call. Raises `Forbidden`, `MalformedBody`, `InvalidRequest`.

        The header is copied before it is read: the caller may still be writing it. Tensors are
        views of the arena.
        """
        image, tenant, session = call.request, call.tenant, call.session
        header, start = split(image)
        repeated = session.repeated
        at = (operation.number, call.at, header, tenant)
        request: Request | None = repeated.get(at)
        if request is not None:
            return request
        room = len(image) - start
        key = (operation.number, header, room, tenant)
        prepared = self._known.get(key)
        if prepared is None:
            prepared = prepare(operation, header, room, self._info, tenant)
            if len(header) <= REMEMBERED_BYTES:
                self._remember(key, prepared)
        else:
            self._known.move_to_end(key)
        tensors = place(image, start, prepared.layout)
        if session.pinned:  # copies of unaligned tensors are not, and own their bytes
            tensors = {
                name: array if array.base is None else array.view(PinnedArray)
                for name, array in tensors.items()
            }
        answer = AnswerPlace(call.answer, self._limit, session.pinned)
        request = Request(operation, prepared.fields, tensors, answer, tenant, prepared.known)
        is_short = len(header) <= REPEATED_BYTES and weight_of(header) <= REPEATED_WEIGHT
        # views of the arena whose values need no check
        if is_short and all(one.base is not None and one.dtype != BOOL for one in tensors.values()):
            if len(repeated) >= MOST_REPEATED:
                repeated.clear()
            repeated[at] = request
        return request

    def _remember(self, key: Header, prepared: Prepared) -> None:
        self._known[key] = prepared
        self._weight += weight_of(key[1])
        while len(self._known) > MOST_REMEMBERED or self._weight > REMEMBERED_WEIGHT:
            (_, oldest, _, _), _ = self._known.popitem(last=False)
            self._weight -= weight_of(oldest)
