"""The calls of records: opaque blocks by key and stamp, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attnd.calls.arguments import Int, sequence_id, shown, whole_number
from attnd.calls.call import Call, Reply, nothing, reads
from attnd.retries import Steps
from attnd.wire.answers import FOUND, RecordLookup, RecordsRead, RecordsStored

Array = NDArray[Any]
UInt8 = NDArray[np.uint8]
RecordKeys = Sequence[bytes | str]
"""1 to 64 bytes each; of a str its UTF-8."""
RecordValues = Array | Sequence[Array | bytes | bytearray | memoryview]
"""The bytes of each record: dense arrays of any dtype, or one array whose rows they are."""

MAX_KEY_BYTES: Final = 64
OUTCOME_BYTES: Final = 32
"""Of one key in an answer."""
DEFAULT_LEASE_S: Final = 10.0


def key_arrays(keys: RecordKeys) -> dict[str, UInt8]:
    """The tensors `keys` and `key_lens`; raises TypeError, and ValueError for a key's length."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"keys is {shown(keys)}: it must be a list of keys, such as [b'a']")
    try:
        raw = [key if type(key) is bytes else as_bytes(key) for key in keys]
    except (TypeError, AttributeError):
        raise TypeError("keys has one that is neither bytes nor a string") from None
    lens = [len(key) for key in raw]
    if lens and not 1 <= min(lens) <= max(lens) <= MAX_KEY_BYTES:
        given = f"keys of {min(lens)} to {max(lens)} bytes"
        raise ValueError(f"{given}: each must have 1 to {MAX_KEY_BYTES}: give a digest of it")
    return {
        "keys": np.frombuffer(b"".join(raw), np.uint8),
        "key_lens": np.array(lens, np.uint8),
    }


def as_bytes(key: Any) -> bytes:
    return key.encode() if isinstance(key, str) else memoryview(key).tobytes()


def flat_bytes(value: Any, field: str) -> UInt8:
    """The bytes of a dense array or a buffer, not copied; raises TypeError for anything else."""
    try:
        array = np.asarray(value if isinstance(value, np.ndarray) else memoryview(value))
    except TypeError:
        raise TypeError(f"{field} is {shown(value)}: it must be bytes or a numpy array") from None
    if not array.flags.c_contiguous or array.dtype == object:
        raise TypeError(f"{field} is not dense: give np.ascontiguousarray of it")
    return array.reshape(-1).view(np.uint8)


def value_arrays(values: RecordValues) -> tuple[UInt8, list[int]]:
    """All bytes back to back, and the number of each record's. One dense array is not copied."""
    if isinstance(values, np.ndarray):
        if not values.ndim:
            raise TypeError("values has no dimension: its first one must be that of the keys")
        each = values.nbytes // max(1, len(values))
        return flat_bytes(values, "values"), [each] * len(values)
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"values is {shown(values)}: it must be a list, one for each key")
    parts = [flat_bytes(value, f"values[{at}]") for at, value in enumerate(values)]
    sizes = [part.size for part in parts]
    if len(parts) == 1:
        return parts[0], sizes
    return np.concatenate(parts) if parts else np.empty(0, np.uint8), sizes


def key_call(operation: str, keys: RecordKeys, fields: dict[str, Any]) -> Call[Any]:
    arrays = key_arrays(keys)
    room = OUTCOME_BYTES * arrays["key_lens"].size
    return Call(operation, reads(operation), fields=fields, arrays=arrays, answer_bytes=room)


def contains_records(
    keys: RecordKeys,
    *,
    stamp: str,
    stop_at_miss: bool = False,
    job: str | None = None,
    lease_s: float = DEFAULT_LEASE_S,
) -> Call[RecordLookup]:
    """Which records are there, and why others are not; with `stop_at_miss` up to the first miss.

    With `job`, those that are found are held, so that they are not evicted, until
    `release_records(job)`, or `lease_s` seconds after the latest call of that job. Raises
    `Overloaded` where the namespace holds too many.
    """
    fields: dict[str, Any] = {"stamp": sequence_id(stamp, "stamp")}
    if stop_at_miss:
        fields["stop_at_miss"] = True
    if job is not None:
        fields |= {"job": sequence_id(job, "job"), "lease_s": float(lease_s)}
    return key_call("contains_records", keys, fields)


def put_records(
    keys: RecordKeys, values: RecordValues, *, stamp: str, durable: bool = False
) -> Call[RecordsStored]:
    """Store records of up to 64 MiB; a record that is there keeps its bytes.

    Returns when host memory has them, with `durable` when they are on disk. A session sends
    an array of `session.empty("values", ...)`, or its first rows, without a copy.
    """
    arrays = key_arrays(keys)
    flat, sizes = value_arrays(values)
    if len(sizes) != arrays["key_lens"].size:
        count = arrays["key_lens"].size
        raise ValueError(f"{len(sizes)} values: there must be {count}, one for each key")
    fields: dict[str, Any] = {"stamp": sequence_id(stamp, "stamp")}
    if durable:
        fields["durable"] = True
    room = OUTCOME_BYTES * len(sizes)
    given: dict[str, Array] = {"sizes": np.array(sizes, np.int64), **arrays, "values": flat}
    return Call("put_records", reads("put_records"), fields=fields, arrays=given, answer_bytes=room)


def get_records(
    keys: RecordKeys,
    *,
    stamp: str,
    into: Sequence[Array] | None = None,
    size: Int | None = None,
) -> Steps[RecordsRead]:
    """Read records, verified where their bytes are used.

    The values of a session are views of its arena. With `into`, one dense array for each key with
    room for its record, they are copied there, and are views of it; after an error nothing is
    written there. Raises ValueError where a record is larger. `size` is the expected size of each,
    which saves a large answer a round trip.
    """
    arrays = key_arrays(keys)
    count = arrays["key_lens"].size
    places = None
    if into is not None:
        places = [flat_bytes(one, f"into[{at}]") for at, one in enumerate(into)]
        if len(places) != count:
            raise ValueError(f"{len(places)} arrays in into: there must be {count}")
    each = whole_number(size, "size") if size is not None else 0
    room = count * (OUTCOME_BYTES + each)
    if size is None and places is not None:
        room += sum(place.size for place in places)

    def parse(reply: Reply) -> RecordsRead:
        outcomes, sizes = tuple(reply.fields["outcomes"]), reply.fields["num_bytes"]
        ends = list(accumulate(sizes, initial=0))
        values: list[UInt8 | None] = [
            reply.tensors["values"][first:last] if outcome == FOUND else None
            for outcome, (first, last) in zip(outcomes, pairwise(ends), strict=True)
        ]
        return RecordsRead(outcomes, tuple(values), reply.meta)

    fields = {"stamp": sequence_id(stamp, "stamp")}
    read: RecordsRead = yield Call("get_records", parse, True, fields, arrays, room)
    return read if places is None else replace(read, values=copied(read.values, places))


def copied(values: Sequence[UInt8 | None], places: Sequence[UInt8]) -> tuple[UInt8 | None, ...]:
    """Copy values to their places; raises ValueError before anything is written."""
    for at, (value, place) in enumerate(zip(values, places, strict=True)):
        if value is not None and value.size > place.size:
            given = f"into[{at}] has {place.size} bytes"
            raise ValueError(f"{given}, its record {value.size}: give a larger array")
    found: list[UInt8 | None] = []
    for value, place in zip(values, places, strict=True):
        if value is not None:
            place = place[: value.size]
            place[...] = value
        found.append(None if value is None else place)
    return tuple(found)


def touch_records(keys: RecordKeys, *, stamp: str) -> Call[RecordLookup]:
    """Make records the most recently used ones."""
    return key_call("touch_records", keys, {"stamp": sequence_id(stamp, "stamp")})


def delete_records(keys: RecordKeys, *, stamp: str) -> Call[RecordLookup]:
    """Delete records; `found` are those that were there."""
    return key_call("delete_records", keys, {"stamp": sequence_id(stamp, "stamp")})


def clear_records() -> Call[int]:
    """Delete all records of the namespace, and overwrite their bytes in files; their number."""
    return Call("clear_records", reads("clear_records"))


def release_records(job: str) -> Call[None]:
    """Release the records that a job holds, if it holds any."""
    return Call("release_records", nothing, fields={"id": sequence_id(job, "job")})
