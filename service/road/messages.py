"""The road's JSON messages: what a session says at its start, as its arena grows, at its end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from attnd.wire.frames import (
    CHALLENGE,
    GROW,
    HELLO,
    NAMES,
    REFUSED,
    TENANT,
    VERSION,
    FrameError,
    json_frame,
)

from service.errors import MalformedBody, problem
from service.image.json_text import load_json
from service.tenants import Tenant, tenant_of

NAME: Final = re.compile(r"[A-Za-z0-9 ._:/-]{0,64}")
LARGEST: Final = 2**63 - 1
MOST_TENANTS: Final = 2**16 - 1
"""What the field of a CALL frame holds."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A caller's first message. `name` is for logs; a `door` passes on calls of others, and shows
    the `secret` of the service's own ones."""

    version: int
    name: str
    door: bool
    arena_bytes: int
    key: str = ""
    secret: str = ""
    brings_arena: bool = False
    """A door's arena is its own; the descriptor comes with this message."""
    nonce: str = ""
    """Over TCP: WELCOME shows by this that the engine knows the secret, too."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A door's word that calls with this number are a tenant's."""

    number: int
    namespace: str
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What the engine is at: `starting`, `ready`, `draining` or `lost`, and why."""

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The engine's answer to HELLO; the arena's descriptor comes beside it."""

    version: int
    session: int
    instance_id: str
    arena_bytes: int
    max_arena_bytes: int
    pinned_bytes: int
    routes: Mapping[str, int]
    limits: Mapping[str, int]
    state: str
    reason: str
    proof: str = ""
    """Over TCP, of HELLO's nonce."""


@dataclass(frozen=True, slots=True)
class Grown:
    """The arena's size after a GROW, all that could be given; the caller maps it anew."""

    arena_bytes: int
    pinned_bytes: int


OVER_TCP: Final = frozenset({"nonce", "proof"})


def message(kind: int, content: Hello | Welcome | Grown | State) -> bytes:
    """A JSON message as a frame; what is only for the road over TCP is left out where it is
    empty."""
    fields = asdict(content)
    return json_frame(
        kind, {name: value for name, value in fields.items() if value or name not in OVER_TCP}
    )


def grow(arena_bytes: int) -> bytes:
    """A GROW frame."""
    return json_frame(GROW, {"arena_bytes": arena_bytes})


def challenge(nonce: str) -> bytes:
    """A CHALLENGE frame."""
    return json_frame(CHALLENGE, {"nonce": nonce})


def announced(tenant: Announced) -> bytes:
    """A TENANT frame."""
    return json_frame(TENANT, asdict(tenant))


def refusal(error: BaseException) -> bytes:
    """A REFUSED frame: the problem for which the engine closes the connection."""
    return json_frame(REFUSED, problem(error))


def read_object(kind: int, payload: bytes) -> dict[str, Any]:
    """The JSON object of a frame."""
    try:
        value = load_json(payload, NAMES[kind])
    except MalformedBody as error:
        raise FrameError(str(error)) from error
    if not isinstance(value, dict):
        raise FrameError(f"{NAMES[kind]} is not a JSON object")
    return value


def read_hello(payload: bytes) -> Hello:
    """A caller's HELLO; keys that are not known here are passed over."""
    value = read_object(HELLO, payload)
    version = count(value, "version", HELLO)
    if version != VERSION:
        raise FrameError(f"version {version}: this service speaks version {VERSION} of the road")
    name = value.get("name", "")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FrameError(f"name {name!r:.40}: at most 64 of A-Z a-z 0-9 space . _ : / -")
    size = count(value, "arena_bytes", HELLO)
    key, secret = word(value, "key"), word(value, "secret")
    return Hello(
        version,
        name,
        truth(value, "door"),
        size,
        key,
        secret,
        truth(value, "brings_arena"),
        word(value, "nonce"),
    )


def truth(value: dict[str, Any], key: str) -> bool:
    """A key of HELLO that is true or false, and may be left out."""
    told = value.get(key, False)
    if not isinstance(told, bool):
        raise FrameError(f"{key} {told!r:.40}: true or false")
    return told


def word(value: dict[str, Any], key: str) -> str:
    """A key of HELLO that may be left out, and of which no error tells what it holds."""
    text = value.get(key, "")
    if not isinstance(text, str) or not text.isascii():
        raise FrameError(f"{key} in HELLO: a string of ASCII characters, or leave it out")
    return text


def read_announced(payload: bytes) -> tuple[int, Tenant]:
    """A tenant, and the number by which a door's calls name it."""
    value = read_object(TENANT, payload)
    number = count(value, "number", TENANT)
    namespace, scopes = value.get("namespace"), value.get("scopes")
    if not 0 < number <= MOST_TENANTS:
        raise FrameError(f"number {number} in TENANT: 1 to {MOST_TENANTS}")
    if not isinstance(namespace, str) or not isinstance(scopes, list):
        raise FrameError("TENANT has a namespace, a string, and scopes, a list")
    try:
        return number, tenant_of(namespace, map(str, scopes))
    except ValueError as error:
        raise FrameError(f"TENANT {number}: {error}") from error


def read_grow(payload: bytes) -> int:
    """The arena size that a GROW asks for."""
    return count(read_object(GROW, payload), "arena_bytes", GROW)


def count(value: dict[str, Any], key: str, kind: int) -> int:
    """A key that must hold a non-negative integer."""
    number = value.get(key)
    if type(number) is not int or not 0 <= number <= LARGEST:
        raise FrameError(f"{key} {number!r:.40} in {NAMES[kind]}: an integer from 0 to 2^63-1")
    return number


def read_known(kind: int, payload: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    """Those keys of an engine's message that this version knows; all must be there."""
    value = read_object(kind, payload)
    missing = [key for key in keys if key not in value]
    if missing:
        raise FrameError(f"{NAMES[kind]} lacks {', '.join(missing)}")
    return {key: value[key] for key in keys}
