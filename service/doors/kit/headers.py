"""Headers and metadata that all doors have: media types, request ids, trace contexts, stages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from random import getrandbits
from typing import Final

from service.errors import InvalidRequest

SAFETENSORS: Final = "application/vnd.safetensors"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
OCTETS: Final = "application/octet-stream"


REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,200})?"
)
"""W3C Trace Context: version, trace, parent, flags; later versions may append fields."""
DEADLINE: Final = "X-Attnd-Deadline-Ms"
MAX_DEADLINE_MS: Final = 3_600_000.0
HEX_ID: Final = re.compile(rb"[0-9a-fA-F]{32}")


def request_id_of(given: bytes) -> bytes:
    """The client's request id, or a random one if that is missing or invalid."""
    return given if REQUEST_ID.fullmatch(given) else b"%032x" % getrandbits(128)


def traceparent_of(given: bytes) -> bytes:
    """The caller's trace context; empty if it is missing or invalid."""
    return given if TRACEPARENT.fullmatch(given) else b""


def deadline_us_of(given: bytes) -> int:
    """The deadline in a request's header, in microseconds. Raises InvalidRequest."""
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 1.0 <= milliseconds <= MAX_DEADLINE_MS:
        rule = f"must be milliseconds, 1 to {MAX_DEADLINE_MS:.0f}"
        raise InvalidRequest(DEADLINE, given.decode("latin-1"), rule)
    return int(milliseconds * 1e3)


def call_id_of(request_id: bytes) -> bytes:
    """A request id in the 16 bytes that the road has for it: the id itself if it is 32 hexadecimal
    digits, else its BLAKE2b digest."""
    if HEX_ID.fullmatch(request_id):
        return bytes.fromhex(request_id.decode("ascii"))
    return blake2b(request_id, digest_size=16).digest()


def server_timing(stages: Sequence[float]) -> bytes:
    """The header Server-Timing: milliseconds per stage, 0 for one the request never reached."""
    queue, plan, copy_in, kernel, copy_out, encode = stages
    return (
        b"queue;dur=%.3f, plan;dur=%.3f, copy-in;dur=%.3f, kernel;dur=%.3f, "
        b"copy-out;dur=%.3f, encode;dur=%.3f"
    ) % (queue * 1e3, plan * 1e3, copy_in * 1e3, kernel * 1e3, copy_out * 1e3, encode * 1e3)
