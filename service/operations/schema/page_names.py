"""Names of pages: token ids or the caller's own keys, as JSON or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import numpy as np
from attnd.wire.bounds import MAX_NAMES
from numpy.typing import NDArray
from pydantic import Field

from service.operations.schema.fields import Count, Entries, Fields, InfoAnswer, TokenId, refuse
from service.operations.schema.spec import TensorSpec

UInt32 = NDArray[np.uint32]
UInt8 = NDArray[np.uint8]

KEY_BYTES: Final = 16
KEY_PATTERN: Final = r"^[0-9a-f]{32}$"
SALT_PATTERN: Final = r"^[!-~]{0,128}$"

MAX_EXTRA: Final = 256
MAX_EXTRA_A_PAGE: Final = 4
MAX_EXTRA_BYTES: Final = 32
EXTRA_PATTERN: Final = rf"^([0-9a-f]{{2}}){{1,{MAX_EXTRA_BYTES}}}$"

PageKey = Annotated[str, Field(pattern=KEY_PATTERN, examples=["0f" * 16])]
CacheSalt = Annotated[str, Field(pattern=SALT_PATTERN)]
Seconds = Annotated[float, Field(gt=0.0, le=365 * 86400.0)]


class ExtraKey(Fields):
    """Further key material of a prompt from one token on, such as the digest of an image, whose
    placeholders have the same ids as any other's."""

    first_token: Count
    """Index in `token_ids`; each is above the one before."""
    key: Annotated[str, Field(pattern=EXTRA_PATTERN, examples=["0f" * MAX_EXTRA_BYTES])]
    """1 to 32 bytes, as hex digits."""


ExtraKeys = Annotated[list[ExtraKey], Field(max_length=MAX_EXTRA, fail_fast=True)]


class PageNames(Fields):
    """The beginning of a prompt: `token_ids` or `page_keys`, as a field or tensor of that name."""

    token_ids: Annotated[list[TokenId] | None, Field(fail_fast=True)] = None
    """Token ids from the first on; a partial last page is ignored."""
    page_keys: Annotated[list[PageKey] | None, Field(fail_fast=True)] = None
    """Page keys from the caller's own hash chain: 32 hex digits per page, in order."""
    cache_salt: CacheSalt = ""
    """Salt of the pages: they are only found under the salt they were committed with."""

    @cached_property
    def ids_array(self) -> UInt32 | None:
        """uint32 [n]."""
        return None if self.token_ids is None else np.array(self.token_ids, np.uint32)

    @cached_property
    def keys_array(self) -> UInt8 | None:
        """uint8 [n, 16]."""
        if self.page_keys is None:
            return None
        raw = bytes.fromhex("".join(self.page_keys))
        return np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)


class PromptNames(PageNames):
    """The names of one prompt's pages."""

    extra: ExtraKeys | None = None
    """With token ids: keys that enter the names of the page of their first token and of all pages
    behind it. Pages before it are shared with prompts that have others. At most 4 in a page."""


Tier = Literal["pool", "host", "disk"]


class SoughtPages(PromptNames):
    """The beginning of a prompt to look up, in all tiers that the service has."""

    tiers: list[Tier] | None = None
    """Tiers to use; absent: all. The pool is always used."""
    max_load_pages: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of pages to load from other tiers; absent: no limit."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        check_prompt(self, entries, info)


class TierTokens(Fields):
    """Tokens by the tier that had them."""

    pool: Annotated[int, Field(ge=0)]
    host: Annotated[int, Field(ge=0)]
    disk: Annotated[int, Field(ge=0)]


NAMES: Final = (
    TensorSpec("token_ids", ("U32",), ("n",), "token ids, instead of the field", optional=True),
    TensorSpec(
        "page_keys", ("U8",), ("pages", KEY_BYTES), "page keys, instead of the field", optional=True
    ),
)


def given_names(fields: PageNames, entries: Entries) -> list[str]:
    """The given ones of `token_ids` and `page_keys`, as fields or tensors."""
    given = [name for name in ("token_ids", "page_keys") if getattr(fields, name) is not None]
    for name in entries:
        if name in given:
            refuse(name, "given", "is also given as a tensor: omit the field")
    return given + [name for name in ("token_ids", "page_keys") if name in entries]


def check_prompt(fields: PromptNames, entries: Entries, info: InfoAnswer, place: str = "") -> None:
    """The names of one prompt, whose fields are at `place` in the request."""
    (name,) = check_names_given(fields, entries)
    count = num_given(fields, name, entries)
    check_num_names(f"{place}{name}", count)
    if fields.extra is not None:
        check_extra(f"{place}extra", fields.extra, name, count, info.page_size)


def num_given(fields: PageNames, name: str, entries: Entries) -> int:
    """Number of token ids or page keys, in the field or tensor of that name."""
    return entries[name].shape[0] if name in entries else len(getattr(fields, name))


def check_num_names(field: str, count: int) -> None:
    """At most `MAX_NAMES`, which take some milliseconds to hash."""
    if count > MAX_NAMES:
        remedy = "commit more in further calls, with offset; look up no more than these"
        refuse(field, f"{count} items", f"at most {MAX_NAMES} in a call: {remedy}")


def keys_of(extra: Sequence[ExtraKey] | None) -> list[tuple[int, bytes]]:
    """Further keys, each with the token that it begins at."""
    return [(one.first_token, bytes.fromhex(one.key)) for one in extra or ()]


def check_extra(
    field: str, extra: Sequence[ExtraKey], name: str, count: int, page_size: int
) -> None:
    """Keys beside `count` token ids: in order, and few for each page."""
    if name != "token_ids":
        refuse(field, "given", "goes with token_ids: page_keys cover all that they must")
    firsts = [one.first_token for one in extra]
    for at, first in enumerate(firsts):
        if at and first <= firsts[at - 1]:
            rule = f"must be above {firsts[at - 1]}, the one before: sort them"
            refuse(f"{field}.{at}.first_token", first, rule)
        if first >= count:
            rule = f"must be below {count}, the number of token ids: leave out those behind them"
            refuse(f"{field}.{at}.first_token", first, rule)
        if (
            at >= MAX_EXTRA_A_PAGE
            and firsts[at - MAX_EXTRA_A_PAGE] // page_size == first // page_size
        ):
            rule = f"at most {MAX_EXTRA_A_PAGE} in a page: give one digest of all of them"
            refuse(f"{field}.{at}.first_token", first, rule)


def check_names_given(fields: Any, entries: Entries) -> list[str]:
    """The one of `token_ids` and `page_keys` that is given, in a list."""
    given = given_names(fields, entries)
    if len(given) != 1:
        refuse("token_ids", " and ".join(given) or None, "give either token_ids or page_keys")
    return given
