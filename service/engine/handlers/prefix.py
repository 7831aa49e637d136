"""Operations on the prefix cache: match, commit, leases, pins, evict, clear, and quotas."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from service.core.errors import UnknownPage
from service.core.keys import Prefix, as_keys, extra_by_page
from service.core.nodes import FOREVER, Retention
from service.engine.handlers.tiers import after_loading, cached_by_tier, until_durable
from service.engine.store.store import Store
from service.engine.tiers.loads import Origin
from service.engine.work.request import Request
from service.engine.work.work import (
    NOTHING,
    TURN_S,
    Answer,
    Completed,
    Counts,
    Fields,
    Seconds,
    SlicedWork,
    Slices,
    Work,
    in_slices,
)
from service.errors import NotErased
from service.operations.prefix import MAX_HOLDS
from service.operations.schema.page_names import ExtraKey, PageNames, PromptNames, keys_of

Array = np.ndarray[Any, Any]

ANSWER_BYTES: Final = 512
"""Room for an answer of a few numbers and names."""
COMMITTED_BYTES: Final = 96
"""Room for one sequence in the answer to a commit of many."""
EVICTED_AT_ONCE: Final = 256
"""Pages that are evicted between two looks at the clock: up to a millisecond or two."""


def match_prefix(store: Store, request: Request, _: Seconds) -> Work:
    """The cached part of a prompt, with a lease on it on request."""
    fields, namespace = request.fields, request.tenant.namespace
    prefix = prompt_of(store, fields, request.tensors)
    cache, size = store.tree.cache, store.geometry.page_size
    leases = bool(fields.lease_s) and not store.is_draining
    if leases:
        store.refuse_hold(namespace)

    def finish(origin: Origin | None) -> Counts:
        lease = None
        if leases:
            store.refuse_hold(namespace)
            lease_id = f"lease-{secrets.token_hex(10)}"
            room = store.lease_room(namespace)
            num_pages = cache.lease(namespace, prefix, lease_id, fields.lease_s, room)
            if num_pages:
                lease = {"id": lease_id, "expires_at": time.time() + fields.lease_s}
        else:
            num_pages = cache.use(namespace, prefix)
            num_pages = max(num_pages, origin.total() if origin else 0)
        matched = {"matched_len": num_pages * size, "num_pages": num_pages, "lease": lease}
        request.place.lay(matched | cached_by_tier(store, num_pages, origin))
        return looked_up(prefix, num_pages, size)

    most = store.lease_room(namespace) if leases else None
    return after_loading(store, request, prefix, finish, loads=leases, most=most)


def prefetch(store: Store, request: Request, _: Seconds) -> Work:
    namespace, size = request.tenant.namespace, store.geometry.page_size
    prefix = prompt_of(store, request.fields, request.tensors)

    def finish(origin: Origin | None) -> Counts:
        num_pages = store.tree.cache.use(namespace, prefix)
        matched = {"matched_len": num_pages * size, "num_pages": num_pages}
        request.place.lay(matched | cached_by_tier(store, num_pages, origin))
        return NOTHING

    return after_loading(store, request, prefix, finish, loads=not store.is_draining)


def commit(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    skipped = fields.offset // store.geometry.page_size
    prefix = prompt_of(store, fields, request.tensors, skipped)
    num_pages = store.tree.commits.commit(fields.id, prefix, *retention(store, fields))
    committed = {
        "committed_len": num_pages * store.geometry.page_size,
        "num_pages": num_pages,
        "last_key": last_key(store, fields.id, num_pages),
    }
    lay = partial(lay_committed, request, committed)
    return until_durable(store, request.tenant.namespace, [fields.id], [num_pages], lay)


def lay_committed(request: Request, committed: Fields, durable: bool | None) -> None:
    """The answer to a commit; `durable` None: commits are not written to disk."""
    request.place.lay(committed if durable is None else committed | {"durable": durable})


def commit_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """All or none."""
    fields, size = request.fields, store.geometry.page_size
    ids, sums = fields.ids, fields.names_indptr
    request.place.require(ANSWER_BYTES + COMMITTED_BYTES * len(ids))
    whole = prefix_of(fields, request.tensors, sums[-1])
    offsets, extra = fields.offsets or [0] * len(ids), fields.extra or [None] * len(ids)
    prefixes = [
        with_extra(part_of(whole, first, last, offset // size), keys, size)
        for first, last, offset, keys in zip(sums, sums[1:], offsets, extra, strict=False)
    ]
    pages = store.tree.commits.commit_all(ids, prefixes, *retention(store, fields))
    keys = [last_key(store, name, count) for name, count in zip(ids, pages, strict=True)]
    lens = [count * size for count in pages]
    committed = {"committed_lens": lens, "num_pages": pages, "last_keys": keys}
    lay = partial(lay_committed, request, committed)
    return until_durable(store, request.tenant.namespace, ids, pages, lay)


def part_of(prefix: Prefix, first: int, last: int, skipped: int) -> Prefix:
    """The ids or keys `first:last` of many, behind `skipped` pages."""
    if prefix.token_ids is not None:
        return Prefix(prefix.token_ids[first:last], None, prefix.cache_salt, skipped)
    keys = None if prefix.page_keys is None else prefix.page_keys[first:last]
    return Prefix(None, keys, prefix.cache_salt, skipped)


def retention(store: Store, fields: Any) -> list[Retention]:
    """Priority and duration of a commit's pages, if it has any."""
    if fields.priority is None:
        return []
    ends = FOREVER if fields.duration_s is None else store.now + fields.duration_s
    return [Retention(fields.priority, ends)]


def last_key(store: Store, name: str, num_pages: int) -> str | None:
    """The key of the last of a sequence's committed pages, its first `num_pages`."""
    if not num_pages:
        return None
    leaf = store.tree.books.leaf(name)
    return store.tree.cache.named.key_of(leaf.table.page(num_pages - 1)).hex()


def renew_lease(store: Store, request: Request, _: Seconds) -> Fields:
    fields = request.fields
    namespace = request.tenant.namespace
    store.tree.cache.renew_lease(namespace, fields.id, store.now + fields.lease_s)
    return {"id": fields.id, "expires_at": time.time() + fields.lease_s}


def release_lease(store: Store, request: Request, _: Seconds) -> Fields:
    store.tree.cache.close_lease(request.tenant.namespace, request.fields.id)
    return {}


def pin(store: Store, request: Request, _: Seconds) -> Answer:
    fields, loading = request.fields, store.loading
    key, namespace = bytes.fromhex(fields.page_key), request.tenant.namespace
    cache, last = store.tree.cache, (namespace, key, fields.cache_salt)
    if fields.hard:
        refuse_holding(store, *last)
        if cache.pinned(*last) is None:
            store.refuse_hold(namespace)
        if loading is not None:
            loading.pins.refuse(*last)
    answer = {"num_pages": cache.pin(*last, fields.soft_ttl_s)}
    if not fields.hard or loading is None:
        return answer
    return after_pieces(request, answer, loading.pins.keep(*last))


def after_pieces(request: Request, answer: Fields, pieces: Generator[None, None, None]) -> Answer:
    """An answer after pieces of the engine's own work, in slices where they take long."""
    ends = time.monotonic() + TURN_S

    def slices() -> Slices:
        yield from in_slices(pieces)
        request.place.lay(answer)

    for _piece in pieces:
        if time.monotonic() >= ends:
            return SlicedWork(slices(), must_finish=lambda: True)
    return answer


def refuse_holding(store: Store, namespace: str, key: bytes, cache_salt: str) -> None:
    """While the engine is draining, raises NotReady, or UnknownPage for an unknown page."""
    if store.is_draining:
        store.tree.cache.chain(namespace, key, cache_salt)
        store.refuse_new()


def unpin(store: Store, request: Request, _: Seconds) -> Answer:
    fields, key = request.fields, bytes.fromhex(request.fields.page_key)
    namespace, loading = request.tenant.namespace, store.loading
    pages = None if loading is None else loading.pins.drop(namespace, key, fields.cache_salt)
    try:
        store.tree.cache.unpin(namespace, key, fields.cache_salt)
    except UnknownPage:
        if pages is None:  # a pin from before a restart has no pages in the pool yet
            raise
    if loading is None or pages is None:
        return {}
    return after_pieces(request, {}, loading.pins.settle(namespace, pages))


def holds(store: Store, request: Request, _: Seconds) -> Fields:
    found = store.tree.cache.holds(request.tenant.namespace, MAX_HOLDS)
    every = [
        {
            "lease": one.lease_id,
            "left_s": None if one.lease_id is None else max(0.0, one.ends - store.now),
            "page_key": one.key.hex(),
            "cache_salt": one.root.cache_salt,
            "num_pages": one.num_pages,
        }
        for one in found
    ]
    return {"holds": every}


def evict(store: Store, request: Request, _: Seconds) -> Work:
    return evicting(store, request, request.fields.num_pages)


def clear(store: Store, request: Request, _: Seconds) -> Work:
    return evicting(store, request, store.geometry.num_pages, is_clear=True)


def evicting(store: Store, request: Request, count: int, is_clear: bool = False) -> Work:
    """Evict up to `count` pages of the caller's from all tiers, some at a time. Once some are
    evicted, the others are, too."""
    cache, namespace = store.tree.cache, request.tenant.namespace
    tiers = None if store.loading is None else store.loading.tiers

    def some(count: int) -> int:
        with nullcontext() if tiers is None else tiers.discarding():
            return cache.evict(namespace, min(count, EVICTED_AT_ONCE))

    def finish(evicted: int) -> None:
        if is_clear:
            cache.cleared(namespace)
        request.place.lay({"num_pages": evicted})

    evicted = some(count)
    is_over = evicted < EVICTED_AT_ONCE or evicted == count
    if is_over and not (is_clear and store.loading is not None):
        finish(evicted)
        return Completed()

    def pieces(done: int) -> Generator[None, None, int]:
        while done < count and (more := some(count - done)):
            done += more
            yield
        return done

    def slices() -> Slices:
        done = evicted if is_over else (yield from in_slices(pieces(evicted)))
        if is_clear and store.loading is not None:
            try:
                yield from store.loading.clear(namespace)
            except NotErased:
                cache.cleared(namespace)  # readers of events learn what is left
                raise
            done += yield from in_slices(pieces(0))  # what loads under way had committed
        finish(done)

    return SlicedWork(slices(), must_finish=lambda: True)


def most_tokens(store: Store) -> int:
    """One token more than the pool holds: nothing behind can be cached or committed."""
    return store.geometry.num_pages * store.geometry.page_size + 1


def prompt_of(
    store: Store, fields: PromptNames, tensors: Mapping[str, Array], skipped: int = 0
) -> Prefix:
    """The prefix that a prompt's fields or tensors name behind `skipped` pages."""
    prefix = prefix_of(fields, tensors, most_tokens(store), skipped)
    return with_extra(prefix, fields.extra, store.geometry.page_size)


def with_extra(prefix: Prefix, extra: Sequence[ExtraKey] | None, page_size: int) -> Prefix:
    """A prefix of token ids with further keys, whose tokens count from its first."""
    if not extra:
        return prefix
    return replace(prefix, extra=extra_by_page(keys_of(extra), page_size, prefix.skipped))


def prefix_of(
    fields: PageNames, tensors: Mapping[str, Array], most: int, skipped: int = 0
) -> Prefix:
    """The prefix that fields or tensors name behind `skipped` pages, `most` tokens or keys of it.

    Tensors are copied, as the caller can still write to them.
    """
    ids, keys = tensors.get("token_ids", fields.ids_array), tensors.get("page_keys")
    if ids is not None:
        return Prefix(np.array(ids[:most], np.uint32), None, fields.cache_salt, skipped)
    keys = fields.keys_array if keys is None else keys
    if keys is None:
        raise RuntimeError("neither token ids nor page keys: this is a bug")
    return Prefix(None, as_keys(keys[:most].tobytes()), fields.cache_salt, skipped)


def looked_up(prefix: Prefix, num_pages: int, page_size: int) -> Counts:
    """Tokens looked up in whole pages, and tokens found."""
    return Counts(looked_up=prefix.num_pages(page_size) * page_size, found=num_pages * page_size)
