"""The road's JSON messages: for the start of a session, the growth of its arena, and its end."""

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
"""The largest value of the field in a CALL frame."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A caller's first message. `name` is for logs. A `door` forwards calls of other callers, and
    sends the `secret` of the service's own doors."""

    version: int
    name: str
    door: bool
    arena_bytes: int
    key: str = ""
    secret: str = ""
    brings_arena: bool = False
    """Whether the door provides the arena: its descriptor comes with this message."""
    nonce: str = ""
    """Over TCP: WELCOME proves with it that the engine knows the secret, too."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A door's announcement that calls with this number are a tenant's."""

    number: int
    namespace: str
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The engine's state: `starting`, `ready`, `draining` or `lost`, and the reason."""

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The engine's reply to HELLO; the arena's descriptor comes with it."""

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
    """Over TCP: the proof for HELLO's nonce."""


@dataclass(frozen=True, slots=True)
class Grown:
    """The arena's size after a GROW, possibly less than requested; the caller remaps it."""

    arena_bytes: int
    pinned_bytes: int


OVER_TCP: Final = frozenset({"nonce", "proof"})


def message(kind: int, content: Hello | Welcome | Grown | State) -> bytes:
    """A JSON message as a frame, without empty fields that only TCP uses."""
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
    """A caller's HELLO; unknown keys are ignored."""
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
    """An optional boolean in HELLO."""
    found = value.get(key, False)
    if not isinstance(found, bool):
        raise FrameError(f"{key} {found!r:.40}: true or false")
    return found


def word(value: dict[str, Any], key: str) -> str:
    """An optional text in HELLO; no error shows its value, which may be a secret."""
    text = value.get(key, "")
    if not isinstance(text, str) or not text.isascii():
        raise FrameError(f"{key} in HELLO: a string of ASCII characters, or leave it out")
    return text


def read_announced(payload: bytes) -> tuple[int, Tenant]:
    """A tenant, and its number in a door's calls."""
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
    """The arena size in a GROW."""
    return count(read_object(GROW, payload), "arena_bytes", GROW)


def count(value: dict[str, Any], key: str, kind: int) -> int:
    """A key that must hold a non-negative integer."""
    number = value.get(key)
    if type(number) is not int or not 0 <= number <= LARGEST:
        raise FrameError(f"{key} {number!r:.40} in {NAMES[kind]}: an integer from 0 to 2^63-1")
    return number


def read_known(kind: int, payload: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    """These keys of an engine's message, of which none may be missing."""
    value = read_object(kind, payload)
    missing = [key for key in keys if key not in value]
    if missing:
        raise FrameError(f"{NAMES[kind]} lacks {', '.join(missing)}")
    return {key: value[key] for key in keys}
