"""Imports: a hidden sequence takes its pages at once, its rows part by part, and its name last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from service.core.nodes import FOREVER
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.handlers.exports import (
    PartDigest,
    count_rows,
    header_digest,
    pieces,
    refuse_groups,
    rows_at_once,
    spans_of,
)
from service.engine.handlers.prefix import prompt_of
from service.engine.store.imports import UnfinishedImport
from service.engine.store.store import Store
from service.engine.work.request import Request
from service.engine.work.work import (
    Answer,
    Cost,
    Fields,
    Seconds,
    Slice,
    SlicedWork,
    Slices,
    Work,
    empty_slice,
)
from service.errors import (
    DigestMismatch,
    ImportExists,
    InvalidRequest,
    PartMismatch,
    SequenceExists,
)
from service.operations.schema.page_names import PromptNames
from service.operations.transfer import Header


def import_sequence(store: Store, request: Request, _: Seconds) -> Answer:
    refuse_groups(store)
    fields = request.fields
    if fields.header is not None:
        return begin(store, request, fields.header)
    if fields.part is not None:
        return receive(store, request)
    return finish(store, request)


def get_import(store: Store, request: Request, _: Seconds) -> Fields:
    return report(request, store.imports.get(request.fields.id))


def cancel_import(store: Store, request: Request, _: Seconds) -> Fields:
    ended = store.imports.get(request.fields.id)
    store.tree.free((ended.hidden,))
    store.imports.remove(ended)
    return {}


def begin(store: Store, request: Request, header: Header) -> Fields:
    """Reserve the pages, all or none; or report the progress of an equal import under way."""
    fields, tree = request.fields, store.tree
    if fields.id in tree.books:
        raise SequenceExists((fields.id,))
    digest = header_digest(header, request.tensors)
    if digest.hex() != fields.digest:
        raise DigestMismatch("header", fields.digest, digest.hex())
    under_way = store.imports.find(fields.id)
    if under_way is not None and under_way.begun != digest:
        raise ImportExists(fields.id)
    if under_way is None:
        store.refuse_new()
        store.refuse_sequences(request.tenant.namespace, 1)
        under_way = take_pages(store, request, header, digest)
        store.imports.add(under_way)
    touch(store, under_way)
    return report(request, under_way)


def take_pages(store: Store, request: Request, header: Header, digest: bytes) -> UnfinishedImport:
    """Create the hidden sequence, on cached pages as far as names match. Raises `OutOfPages`."""
    fields, tree = request.fields, store.tree
    size, prefix = header.page_size, None
    if fields.share and header.num_named:
        names = PromptNames(cache_salt=header.cache_salt, extra=header.extra)
        prefix = prompt_of(store, names, request.tensors)
    namespace = request.tenant.namespace
    new = UnfinishedImport(fields.id, namespace, header, digest, digest, 0, 0, fields.idle_s, 0.0)
    spec = NewSpec(new.hidden, None, None, prefix, namespace, fields.idle_s)
    tree.create((spec,))
    leaf = tree.books.leaf(new.hidden)
    leaf.origin = None
    try:
        new.first_page = tree.describe(new.hidden).length // size
        fill(tree, new.hidden, header.lengths)
    except BaseException:
        tree.free((new.hidden,))
        raise
    new.next_part = new.first_page // header.pages_per_part * header.parts_per_run
    if new.first_page * size >= max(header.lengths):  # no part has rows behind the cached pages
        new.next_part = header.num_parts
    if new.next_part:
        new.latest = None
    return new


def receive(store: Store, request: Request) -> Work:
    """Receive a part: check its digest, then write its rows to the import's own pages."""
    fields = request.fields
    into = store.imports.get(fields.id)
    header, number = into.header, fields.part
    if number != into.next_part or number >= header.num_parts:
        raise PartMismatch(number, into.next_part, header.num_parts)
    spans = spans_of(header, header.part(number))
    k, v = request.tensors["k"], request.tensors["v"]
    if len(k) != count_rows(spans):
        rule = f"part {number} has {count_rows(spans)} rows"
        raise InvalidRequest("k.shape", list(k.shape), rule)
    digest = PartDigest(digest_before(into, fields.before), number)
    leaf = store.tree.books.leaf(into.hidden)

    def slices() -> Slices:
        at_once = rows_at_once(store)
        for start in range(0, len(k), at_once):
            digest.update(k[start : start + at_once], v[start : start + at_once])
            yield empty_slice()
        found = digest.digest()
        if found.hex() != fields.digest:
            raise DigestMismatch(f"part {number}", fields.digest, found.hex())
        own = into.first_page * header.page_size
        for layer, rows, slots in pieces(store, leaf.table, spans, own):
            write = partial(store.backend.write_stored, layer, k[rows], v[rows], slots)
            cost = Cost(num_bytes=2.0 * (k[rows].nbytes + v[rows].nbytes))
            yield Slice(write, "import", cost)
        into.next_part, into.latest = number + 1, found
        touch(store, into)
        request.place.lay(report(request, into))

    return SlicedWork(slices(), made=(into.hidden,))


def digest_before(into: UnfinishedImport, given: str | None) -> bytes:
    """The digest that the next part's digest continues."""
    if into.latest is None:
        if given is None:
            rule = "must be given: the part before was skipped, as its pages are cached here"
            raise InvalidRequest("before", None, rule)
        return bytes.fromhex(given)
    if given is not None and given != into.latest.hex():
        raise DigestMismatch("before", given, into.latest.hex())
    return into.latest


def finish(store: Store, request: Request) -> Fields:
    """Give the sequence its name, once all parts are there."""
    fields = request.fields
    if fields.id in store.tree.books:
        raise SequenceExists((fields.id,))
    into = store.imports.get(fields.id)
    num_parts = into.header.num_parts
    if into.next_part < num_parts:
        raise PartMismatch(num_parts, into.next_part, num_parts)
    if into.latest is not None and fields.digest != into.latest.hex():
        raise DigestMismatch("digest", fields.digest, into.latest.hex())
    leaf, ttl_s = store.tree.books.leaf(into.hidden), into.header.ttl_s
    store.tree.books.rename(leaf, fields.id)
    store.tree.books.set_ttl(leaf, FOREVER if ttl_s is None else ttl_s)
    store.imports.remove(into)
    return report(request, into, is_done=True)


def fill(tree: PrefixTree, name: str, lengths: Sequence[int]) -> None:
    """Extend a sequence to `lengths`, one per layer, none below the present one.

    Allocates pages for the longest; the caller writes the rows. Raises `OutOfPages`.
    """
    leaf = tree.books.leaf(name)
    wanted = np.array(lengths, np.int32)
    longest = int(wanted.argmax())
    count = wanted[longest] - tree.books.lengths[longest, leaf.index]
    tree.extend(longest, (name,), np.array([count], np.int32))
    tree.books.lengths[:, leaf.index] = wanted


def touch(store: Store, into: UnfinishedImport) -> None:
    """Restart an import's time to live."""
    store.tree.books.leaf(into.hidden)
    into.expires_at = time.time() + into.idle_s


def report(request: Request, into: UnfinishedImport, is_done: bool = False) -> Fields:
    return {
        "id": request.tenant.shown(into.name),
        "state": "done" if is_done else "receiving",
        "next_part": into.next_part,
        "num_parts": into.header.num_parts,
        "cached_len": into.first_page * into.header.page_size,
        "digest": None if into.latest is None else into.latest.hex(),
        "expires_at": None if is_done else into.expires_at,
    }
