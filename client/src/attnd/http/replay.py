"""Repeated calls over HTTP: their requests are laid out once, and what is answered is read against
what was answered before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from attnd.calls.arguments import whole_numbers
from attnd.calls.call import Call, Reply, no_recovery
from attnd.http.messages import ROUTES, Request, Response, meta_of, reply_of
from attnd.replay import Args, Expected, Kwargs, Places, given
from attnd.wire import images

T = TypeVar("T")


def add_array(key: list[object], arg: object) -> bool:
    """Whether it is an array, which then is part of the key by its dtype and shape."""
    if type(arg) is not np.ndarray:
        return False
    key += (arg.dtype, arg.shape)
    return True


class HttpRepeat(Generic[T]):
    """A call that was made before: its request, and how its answer is read."""

    __slots__ = ("_call", "_expected", "_header", "_method", "_places", "_target")

    def __init__(self, call: Call[T], places: Places) -> None:
        ordered = images.in_order(call.arrays)
        self._method, self._target = ROUTES[call.operation]
        self._header = images.cut(call.fields, ordered, images.ALIGNMENT)
        self._places = [places[name] for name, _ in ordered]
        self._call = replace(call, fields={}, arrays={}, recover=no_recovery)
        self._expected: Expected | None = None

    def request(self, args: Args, kwargs: Kwargs, request_id: str, timeout_s: float) -> Request:
        """The request of a call like it."""
        header = images.with_offsets(
            self._header, whole_numbers(kwargs.get("offsets"), "offsets"), images.ALIGNMENT
        )
        arrays = [images.flat(array) for array in given(self._places, args, kwargs)]
        headers = {
            "x-request-id": request_id,
            "content-type": images.MEDIA_TYPE,
            "accept": images.MEDIA_TYPE,
        }
        return Request(self._method, self._target, headers, (header, *arrays), timeout_s)

    def result(self, response: Response, request_id: str) -> T:
        """What a response answers. Raises the `ServiceError` that it is, or `ProtocolError`."""
        return self._call.parse(self._reply(response, request_id))

    def _reply(self, response: Response, request_id: str) -> Reply:
        headers, image, expected = response.headers, response.content, self._expected
        if expected is not None and has_come(expected, response.status, headers, image):
            return expected.reply(image, meta_of(headers, request_id))
        reply = reply_of(response, request_id, self._call)
        self._expected = Expected.like(response.status, image) if reply.tensors else None
        return reply


def is_image(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type") == images.MEDIA_TYPE


def has_come(
    expected: Expected, status: int, headers: Mapping[str, str], image: images.Bytes
) -> bool:
    """Whether a response is as it was expected."""
    head = expected.head
    return (
        status == expected.status
        and len(image) == expected.length
        and is_image(headers)
        and image.data[: len(head)] == head
    )
