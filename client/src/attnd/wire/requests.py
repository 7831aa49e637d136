"""Headers of requests. Steps repeat their calls in all but `offsets`, so headers are remembered."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from attnd.wire import images
from attnd.wire.dtypes import Array, Part
from attnd.wire.frames import dump_json

LONGEST: Final = 16 * 1024
"""Headers up to this many characters are remembered: some hundred sequences."""


class CutHeader(NamedTuple):
    """A request's header without `offsets`: cut where they are inserted, and whole."""

    begin: str
    end: str
    whole: bytes
    alignment: int

    def with_offsets(self, offsets: list[int] | None) -> bytes:
        """The header of a request with these `offsets`; None: without."""
        if offsets is None:
            return self.whole
        return images.padded(f'{self.begin},\\"offsets\\":{offsets}{self.end}', self.alignment)


REMEMBERED: Final[dict[tuple[bytes, tuple[images.Shaped, ...], int], CutHeader]] = {}


def request_image(fields: dict[str, Any], arrays: Mapping[str, Array]) -> list[Part]:
    """A request's image in parts, to be sent one after another; arrays are not copied."""
    ordered = images.in_order(arrays)
    return [request_header(fields, ordered), *[images.flat(array) for _, array in ordered]]


def request_header(
    fields: dict[str, Any],
    arrays: Sequence[tuple[str, Array]],
    alignment: int = images.ALIGNMENT,
) -> bytes:
    """The image of a request up to its arrays, which follow in the order given.

    `offsets`, beside other fields, is a list of ints. Raises TypeError for a dtype without a name.
    """
    return cut_header(fields, arrays, alignment).with_offsets(fields.get("offsets"))


def cut_header(
    fields: dict[str, Any], arrays: Sequence[tuple[str, Array]], alignment: int
) -> CutHeader:
    """A request's header, to be completed by `with_offsets`.

    The key of a remembered one is the fields as `marshal` writes them, which distinguishes 1 from
    True and takes a quarter of the time of JSON.
    """
    if "offsets" in fields:
        fields = {name: value for name, value in fields.items() if name != "offsets"}
    tensors = tuple([(name, array.dtype, array.shape) for name, array in arrays])
    try:
        key = marshal.dumps(fields, 2), tensors, alignment
    except ValueError:  # a type that JSON may know and marshal not: a subclass of str
        return write(fields, tensors, alignment)
    header = REMEMBERED.get(key)
    if header is None:
        header = write(fields, tensors, alignment)
        if len(header.begin) <= LONGEST:
            if len(REMEMBERED) >= images.MAX_REMEMBERED:
                REMEMBERED.clear()
            REMEMBERED[key] = header
    return header


def write(fields: dict[str, Any], tensors: tuple[images.Shaped, ...], alignment: int) -> CutHeader:
    """A header, cut before the brace that ends the fields."""
    request = dump_json(dump_json(fields))
    begin = f'{{"__metadata__":{{"{images.REQUEST}":{request[:-2]}'
    end = f'}}"}}{images.describe(tensors)}}}'
    return CutHeader(begin, end, images.padded(begin + end, alignment), alignment)
