"""The calls of the prefix cache: match, commit, leases, pins, evict, clear, and quotas."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attnd.calls.arguments import (
    Indices,
    Int,
    plain_fields,
    sequence_id,
    sequence_ids,
    shown,
    whole_number,
    whole_numbers,
)
from attnd.calls.call import Call, Reply, nothing, reads, settled_by
from attnd.errors import UnknownLease, UnknownPage
from attnd.wire.answers import CommitResult, EventPage, Hold, Lease, Namespace, PrefixMatch

TokenIds = Indices
PageKeys = Sequence[str | bytes] | NDArray[np.uint8]

KEY_BYTES: Final = 16
DEFAULT_LEASE_S: Final = 10.0
FROM_NOW: Final = -1
SALTED: Final = {"match_prefix", "prefetch", "commit", "commit_sequences", "pin", "unpin"}
"""Operations with a field `cache_salt`; new sequences have it in each prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, by exactly one of `token_ids` and `page_keys`.

    `token_ids` are ints or an integer array; `page_keys` uint8 [n, 16], or the keys as bytes or
    hex. Pages are found again under the `cache_salt` that they were committed with.

    `extra` is further key material beside token ids, such as digests of images, whose placeholders
    have equal ids: pairs, in order, of the index of the first token that it holds for, and 1 to 32
    bytes, or these in hex. Pages before the token are shared with prompts that have others.

    Lookups use all tiers of the service (`pool`, `host`, `disk`), or the given `tiers`, and
    load at most `max_load_pages` from tiers below the pool; commits ignore both.
    """

    token_ids: TokenIds | None = None
    page_keys: PageKeys | None = None
    cache_salt: str = ""
    tiers: Sequence[str] | None = None
    max_load_pages: Int | None = None
    extra: Sequence[tuple[Int, bytes | str]] = ()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The tensor that names the pages; raises ValueError unless exactly one is given."""
        if (self.token_ids is None) == (self.page_keys is None):
            raise ValueError("give either token_ids or page_keys")
        if self.page_keys is not None:
            return {"page_keys": key_array(self.page_keys)}
        return {"token_ids": token_array(self.token_ids if self.token_ids is not None else ())}

    def fields(self) -> dict[str, Any]:
        extra = {"extra": keys} if (keys := self.extra_keys()) else {}
        return extra | ({"cache_salt": self.cache_salt} if self.cache_salt else {})

    def extra_keys(self) -> list[dict[str, Any]]:
        """`extra` as fields; raises TypeError unless it is pairs of an int, and bytes or hex."""
        try:
            return [
                {
                    "first_token": whole_number(first, "extra"),
                    "key": key if isinstance(key, str) else memoryview(key).hex(),
                }
                for first, key in self.extra
            ]
        except (TypeError, ValueError):
            rule = "pairs of a token's index, and bytes or hex, such as [(7, digest)]"
            raise TypeError(f"extra is {shown(self.extra)}: it must be {rule}") from None

    def sought(self) -> dict[str, Any]:
        """The fields of a lookup."""
        if isinstance(self.tiers, str):
            raise TypeError(f"tiers is {self.tiers!r}: it must be a list, such as [{self.tiers!r}]")
        tiers = None if self.tiers is None else list(self.tiers)
        limits = {"tiers": tiers, "max_load_pages": self.max_load_pages}
        return self.fields() | plain_fields(limits)


def prefix_of(given: Prefix) -> Prefix:
    """The same prefix. Raises TypeError for anything else, such as bare token ids."""
    if isinstance(given, Prefix):
        return given
    raise TypeError(f"prefix is {shown(given)}: it must be an attnd.Prefix(token_ids=...)")


def salt(call: Call[Any], cache_salt: str) -> None:
    """Set the salt of a call's prefixes and page keys that have none."""
    if call.operation in SALTED:
        call.fields.setdefault("cache_salt", cache_salt)
    elif call.operation == "create_sequences":
        for new in call.fields["sequences"]:
            if "prefix" in new:
                new["prefix"].setdefault("cache_salt", cache_salt)


def token_array(ids: TokenIds) -> NDArray[np.uint32]:
    """uint32 [n]; raises ValueError for anything but token ids."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"token_ids is {ids!r}: it must be a list of ints or an integer array")
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token_ids are {array.dtype} {list(array.shape)}: they must be flat ints")
    if array.min() < 0 or array.max() >= 2**32:
        raise ValueError(f"token_ids reach from {array.min()} to {array.max()}: they are uint32")
    return np.ascontiguousarray(array, np.uint32)


RowIds = TokenIds | Sequence[TokenIds]
"""Ids of all rows of a call, or a list of ids for each of its sequences."""


def row_ids(ids: RowIds | None) -> tuple[NDArray[np.uint32] | None, list[int] | None]:
    """uint32 [n], and the prefix sums of the lists where there is one for each sequence."""
    if ids is None:
        return None, None
    every: Any = ids
    if not isinstance(ids, (str, bytes)) and len(every) and np.ndim(every[0]):
        parts = [token_array(one) for one in every]
        return np.concatenate(parts), indptr_of(parts)
    return token_array(every), None


def key_array(keys: PageKeys) -> NDArray[np.uint8]:
    """uint8 [n, 16]; raises ValueError for a key of another length, or that is not hex."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            given = f"page_keys are {keys.dtype} {list(keys.shape)}"
            raise ValueError(f"{given}: they must be uint8 [n, {KEY_BYTES}]")
        return np.ascontiguousarray(keys)
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"page_keys is {keys!r}: it must be a list of keys, such as [{keys!r}]")
    try:
        raw = [
            bytes.fromhex(key) if isinstance(key, str) else memoryview(key).tobytes()
            for key in keys
        ]
    except (TypeError, ValueError) as error:
        rule = f"{KEY_BYTES} bytes, or {2 * KEY_BYTES} digits in hex"
        raise ValueError(f"page_keys has a key that is not {rule}: {error}") from None
    if wrong := [key for key in raw if len(key) != KEY_BYTES]:
        raise ValueError(f"a page key has {len(wrong[0])} bytes: it must have {KEY_BYTES}")
    return np.frombuffer(b"".join(raw), np.uint8).reshape(-1, KEY_BYTES)


def match_prefix(prefix: Prefix, *, lease_s: float = DEFAULT_LEASE_S) -> Call[PrefixMatch]:
    """The longest cached beginning, held for `lease_s` seconds (0: not held)."""
    prefix = prefix_of(prefix)
    # Repeatable: a lease whose reply was lost ends by itself.
    fields = {**prefix.sought(), "lease_s": float(lease_s)}
    return Call("match_prefix", reads("match_prefix"), fields=fields, arrays=prefix.arrays())


def prefetch(prefix: Prefix) -> Call[PrefixMatch]:
    """Load the longest cached beginning into the pool; where it was before. Loads as much as it can
    until shortly before the deadline."""
    prefix = prefix_of(prefix)
    fields, arrays = prefix.sought(), prefix.arrays()
    return Call("prefetch", reads("prefetch"), fields=fields, arrays=arrays)


def commit(
    sequence: str,
    prefix: Prefix,
    *,
    offset: Int = 0,
    priority: Int | None = None,
    duration_s: float | None = None,
) -> Call[CommitResult]:
    """Name the sequence's full pages up to the end of `prefix`: they stay cached after its
    deletion.

    With `offset` the prefix begins after that many tokens, which are committed already: the
    `committed_len` of the previous commit. Raises `UnknownSequence`, `InvalidRequest` beyond the
    sequence's length, `KeyMismatch`.
    """
    prefix = prefix_of(prefix)
    fields = {
        "id": sequence_id(sequence, many="commit_sequences"),
        **prefix.fields(),
        "offset": whole_number(offset, "offset") or None,
        "priority": priority,
        "duration_s": duration_s,
    }
    arrays = prefix.arrays()
    return Call("commit", reads("commit"), fields=plain_fields(fields), arrays=arrays)


def commit_sequences(
    sequences: Sequence[str],
    prefixes: Sequence[Prefix],
    *,
    offsets: Indices | None = None,
    priority: Int | None = None,
    duration_s: float | None = None,
) -> Call[tuple[CommitResult, ...]]:
    """`commit` for many sequences, all or none, each with its own prefix.

    The prefixes name pages all by token ids or all by page keys, under one `cache_salt`. Raises
    `UnknownSequence`, `InvalidRequest`, `KeyMismatch`.
    """
    ids, named = sequence_ids(sequences), [prefix_of(prefix).arrays() for prefix in prefixes]
    if len(ids) != len(named):
        raise ValueError(f"{len(named)} prefixes: there must be {len(ids)}, one per sequence")
    if len({(*arrays, one.cache_salt) for arrays, one in zip(named, prefixes, strict=True)}) > 1:
        raise ValueError("name pages all by token_ids or all by page_keys, under one cache_salt")
    arrays = {kind: np.concatenate([one[kind] for one in named]) for kind in (named or [{}])[0]}
    fields = {
        "sequences": ids,
        "names_indptr": indptr_of([part for one in named for part in one.values()]),
        **(prefixes[0].fields() if prefixes else {}),
        "extra": every if any(every := [one.extra_keys() for one in prefixes]) else None,
        "offsets": whole_numbers(offsets, "offsets"),
        "priority": priority,
        "duration_s": duration_s,
    }

    def parse(reply: Reply) -> tuple[CommitResult, ...]:
        columns = [reply.fields[name] for name in ("committed_lens", "num_pages", "last_keys")]
        rows, durable = zip(*columns, strict=True), reply.fields.get("durable")
        return tuple([CommitResult(end, n, key, durable, reply.meta) for end, n, key in rows])

    return Call("commit_sequences", parse, fields=plain_fields(fields), arrays=arrays)


def indptr_of(parts: Sequence[Sized]) -> list[int]:
    """The prefix sums of how long these are."""
    return [0, *accumulate(map(len, parts))]


def renew_lease(lease: str, lease_s: float = DEFAULT_LEASE_S) -> Call[Lease]:
    """Extend a lease to `lease_s` seconds from now; raises `UnknownLease`."""
    fields = {"id": sequence_id(lease, "lease"), "lease_s": float(lease_s)}
    return Call("renew_lease", reads("renew_lease"), fields=fields)


def release_lease(lease: str) -> Call[None]:
    """End a lease; raises `UnknownLease`."""
    fields = {"id": sequence_id(lease, "lease")}
    return Call("release_lease", nothing, fields=fields, recover=settled_by(UnknownLease))


def pin(
    page_key: str | bytes,
    *,
    cache_salt: str = "",
    soft_ttl_s: float | None = None,
    hard: bool = False,
) -> Call[int]:
    """Keep a page and all before it: softly for `soft_ttl_s` seconds, or `hard`, until `unpin`.

    Returns the number of pages kept. Raises `UnknownPage`, `InvalidRequest`.
    """
    fields: dict[str, Any] = page_fields(page_key, cache_salt)
    fields |= {"hard": True} if hard else {}
    fields |= {} if soft_ttl_s is None else {"soft_ttl_s": float(soft_ttl_s)}
    return Call("pin", reads("pin"), fields=fields)


def unpin(page_key: str | bytes, *, cache_salt: str = "") -> Call[None]:
    """Remove the hard and soft pins of a page; raises `UnknownPage` where it has none."""
    fields = page_fields(page_key, cache_salt)
    return Call("unpin", nothing, fields=fields, recover=settled_by(UnknownPage))


def page_fields(key: str | bytes, cache_salt: str) -> dict[str, Any]:
    named = {"page_key": key if isinstance(key, str) else key_array([key]).tobytes().hex()}
    return {**named, "cache_salt": cache_salt} if cache_salt else named


def holds() -> Call[tuple[Hold, ...]]:
    """The hard pins and leases, at most a thousand."""
    return Call("holds", reads("holds"))


def evict(num_pages_at_most: Int) -> Call[int]:
    """Evict cached pages in the order of eviction; returns their number."""
    fields = {"num_pages": whole_number(num_pages_at_most, "num_pages_at_most")}
    return Call("evict", reads("evict"), repeatable=False, fields=fields)


def clear() -> Call[int]:
    """Evict all pages that nothing holds; returns their number."""
    return Call("clear", reads("clear"))


def get_namespace(name: str) -> Call[Namespace]:
    """The quota of a namespace, and its pages by state."""
    fields = {"name": sequence_id(name, "name")}
    return Call("get_namespace", reads("get_namespace"), fields=fields)


def set_namespace(
    name: str,
    *,
    max_pages: Int | None = None,
    reserved_pages: Int = 0,
    max_host_bytes: Int | None = None,
    max_disk_bytes: Int | None = None,
) -> Call[Namespace]:
    """Set a namespace's quota: `max_pages` of the pool, `reserved_pages` that other namespaces
    cannot use, and bytes in the tiers below the pool (None: no limit). Needs the scope `admin`."""
    fields = {
        "name": sequence_id(name, "name"),
        "max_pages": None if max_pages is None else whole_number(max_pages, "max_pages"),
        "reserved_pages": whole_number(reserved_pages, "reserved_pages"),
        **plain_fields({"max_host_bytes": max_host_bytes, "max_disk_bytes": max_disk_bytes}),
    }
    return Call("set_namespace", reads("set_namespace"), fields=fields)


def event_page(after: Int = FROM_NOW, limit: Int | None = None) -> Call[EventPage]:
    """Changes of cached pages since event `after` (0: all events kept; -1: none, only the number of
    the latest event), at most `limit`."""
    fields = plain_fields({"after": after, "limit": limit})
    return Call("events", reads("events"), fields=fields)
