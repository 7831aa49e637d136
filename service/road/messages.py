"""The road's JSON messages: for the start of a session, the growth of its arena, and its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final, TypeVar

from attnd.wire.frames import NAMES, REFUSED, VERSION, FrameError, json_frame
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from config.wording import rule_of
from service.errors import MalformedBody, problem
from service.image.json_text import load_json

STRICT: Final = ConfigDict(strict=True)
NONCE_BYTES: Final = 32
MOST_TENANTS: Final = 2**16 - 1
"""The largest value of the field in a CALL frame."""


def our_version(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"version {version}: this service speaks version {VERSION} of the road")
    return version


Size = Annotated[int, Field(ge=0, le=2**63 - 1)]
Word = Annotated[str, Field(pattern=r"^[\x00-\x7f]*$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class Hello:
    """A caller's first message. `name` is for logs. A `door` forwards calls of other callers, and
    sends the `secret` of the service's own doors."""

    version: Annotated[int, AfterValidator(our_version)]
    arena_bytes: Size
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9 ._:/-]{0,64}$")] = ""
    door: bool = False
    key: Word = ""
    secret: Word = ""
    brings_arena: bool = False
    """Whether the door provides the arena: its descriptor comes with this message."""
    nonce: Word = ""
    """Over TCP: WELCOME proves with it that the engine knows the secret, too."""


@dataclass(frozen=True, slots=True, config=STRICT)
class Challenge:
    """Over TCP, before HELLO: the door proves with `nonce` that it knows the secret."""

    nonce: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class Announced:
    """A door's announcement that calls with this number are a tenant's."""

    number: Annotated[int, Field(ge=1, le=MOST_TENANTS)]
    namespace: str
    scopes: Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True, slots=True, config=STRICT)
class State:
    """The engine's state: `starting`, `ready`, `draining` or `lost`, and the reason."""

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True, config=STRICT)
class Welcome:
    """The engine's reply to HELLO; the arena's descriptor comes with it."""

    version: int
    session: int
    instance_id: str
    arena_bytes: Size
    max_arena_bytes: Size
    pinned_bytes: Size
    routes: dict[str, int]
    limits: dict[str, int | float]
    state: str
    reason: str
    proof: Word = ""
    """Over TCP: the proof for HELLO's nonce."""


@dataclass(frozen=True, slots=True, config=STRICT)
class Grow:
    """A request for an arena of this size, or in DEVICE for such a device arena."""

    arena_bytes: Size


@dataclass(frozen=True, slots=True, config=STRICT)
class Grown:
    """The arena's size after a GROW, possibly less than requested; the caller remaps it."""

    arena_bytes: Size
    pinned_bytes: Size


@dataclass(frozen=True, slots=True, config=STRICT)
class Refused:
    """Why the engine closes the connection."""

    detail: str


M = TypeVar("M")
OVER_TCP: Final = frozenset({"nonce", "proof"})
Message = Hello | Challenge | Announced | State | Welcome | Grow | Grown


def message(kind: int, content: Message) -> bytes:
    """A JSON message as a frame, without empty fields that only TCP uses."""
    fields = asdict(content)
    return json_frame(
        kind, {name: value for name, value in fields.items() if value or name not in OVER_TCP}
    )


def refusal(error: BaseException) -> bytes:
    """A REFUSED frame: the problem for which the engine closes the connection."""
    return json_frame(REFUSED, problem(error))


def read(kind: int, payload: bytes, of: type[M]) -> M:
    """The message in a frame; unknown keys are ignored. Raises FrameError, which shows no values:
    they may be secrets."""
    try:
        value: Any = load_json(payload, NAMES[kind])
        if not isinstance(value, dict):
            raise FrameError(f"{NAMES[kind]} is not a JSON object")
        return of(**value)
    except MalformedBody as error:
        raise FrameError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise FrameError(f"{place} in {NAMES[kind]}: {rule_of(first)}") from None
