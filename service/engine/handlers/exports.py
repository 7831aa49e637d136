"""Exports: a sequence's header and names, and its rows as the pool stores them, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import accumulate
from typing import Any, Final

import numpy as np
from attnd.wire.images import Shaped

from kernels.backend import NUMPY_DTYPES, Array, Int32
from service.core.keys import KEY_BYTES, Prefix, extra_keys
from service.core.nodes import FOREVER, Leaf, named
from service.core.page_table import PageTable
from service.core.plans.ragged import token_slots
from service.core.prefix.matching import named_path
from service.core.tree import PrefixTree
from service.engine.handlers.rows import NUMBER_BYTES
from service.engine.store.store import Store
from service.engine.work.request import Request
from service.engine.work.work import Completed, Cost, Seconds, Slice, SlicedWork, Slices, Work
from service.errors import InvalidRequest, SequenceChanged
from service.image.json_text import dump_json
from service.operations.schema.fields import InfoAnswer
from service.operations.schema.page_names import MAX_EXTRA, ExtraKey
from service.operations.transfer import Header, Part

MOVED_AT_ONCE: Final = 2 * 2**20
"""Bytes of k and v that one slice moves and digests: some milliseconds."""
PART_ROOM: Final = 8 * 2**10
"""Size of a request or an answer beside the k and v of a part."""
TEXT_BYTES: Final = 2048
"""Room for a header beside its lengths, or for the fields of a part."""
GEOMETRY: Final = Header.model_fields.keys() & InfoAnswer.model_fields.keys() - {"version"}
EXTRA_BYTES: Final = 128
"""Room for a further key of the names."""
SOME_DIGEST: Final = "0" * 64
"""Placeholder for a digest that is not known yet."""


def refuse_groups(store: Store) -> None:
    """Raises InvalidRequest in a pool with layer groups: an export has one shape of K and V."""
    if store.geometry.layer_groups:
        rule = "exports and imports take pools without groups: leave pool.groups out"
        raise InvalidRequest("pool.groups", f"{len(store.geometry.groups)} groups", rule)


def export_sequence(store: Store, request: Request, _: Seconds) -> Work:
    fields = request.fields
    refuse_groups(store)
    leaf = store.tree.books.leaf(fields.id)
    header = header_of(store, leaf, fields.part_bytes)
    if fields.part is None:
        return send_header(store, request, leaf, header)
    if fields.generation != header.generation:
        raise SequenceChanged(fields.id, header.generation)
    if fields.part >= header.num_parts:
        raise InvalidRequest("part", fields.part, f"must be below num_parts = {header.num_parts}")
    return read_part(store, request, leaf.table, header)


def shared_len(store: Store, leaf: Leaf, other: Leaf) -> int:
    """Number of tokens in full pages that two sequences share."""
    counts = store.tree.books.num_pages[[leaf.index, other.index]]
    num_pages = int(counts.min())
    differ = np.flatnonzero(leaf.table.read(0, num_pages) != other.table.read(0, num_pages))
    same = int(differ[0]) if differ.size else num_pages
    return same * store.geometry.page_size


def header_of(store: Store, leaf: Leaf, part_bytes: int) -> Header:
    """The header of an export of the sequence as it is now, without names of pages."""
    info, books = store.info, store.tree.books
    limits = info.limits
    most = min(limits.max_answer_bytes, limits.max_body_bytes) - PART_ROOM
    ttl_s = float(books.ttl_s[leaf.index])
    header = Header(
        generation=generation(store.tree, leaf, info.instance_id),
        **info.model_dump(include=GEOMETRY),
        lengths=books.lengths[:, leaf.index].tolist(),
        ttl_s=None if ttl_s == FOREVER else ttl_s,
        num_named=0,
        cache_salt="",
        part_bytes=min(part_bytes, max(1, most)),
        num_parts=0,
    )
    return header.model_copy(update={"num_parts": header.count_parts()})


def named_pages(prefix: Prefix | None) -> dict[str, Array]:
    """The tensor that names pages, by token ids or by keys; none where pages have no names."""
    if prefix is None:
        return {}
    if prefix.token_ids is not None:
        return {"token_ids": prefix.token_ids}
    if prefix.page_keys is None:
        raise RuntimeError("a prefix without names: this is a bug")
    return {"page_keys": prefix.page_keys.view(np.uint8).reshape(-1, KEY_BYTES)}


def header_digest(header: Header, names: dict[str, Array]) -> bytes:
    """SHA-256 of the header as JSON with sorted keys, and of the names' bytes."""
    document = header.document()
    digest = sha256(dump_json({name: document[name] for name in sorted(document)}).encode())
    for name in sorted(names):
        digest.update(np.ascontiguousarray(names[name]).view(np.uint8).data)
    return digest.digest()


class PartDigest:
    """SHA-256 of the digest before, the part's number, and the digests of its k and of its v."""

    def __init__(self, before: bytes, number: int) -> None:
        self._whole = sha256(before + number.to_bytes(8, "little"))
        self._halves = sha256(), sha256()

    def update(self, k: Array, v: Array) -> None:
        for half, rows in zip(self._halves, (k, v), strict=True):
            half.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def digest(self) -> bytes:
        for half in self._halves:
            self._whole.update(half.digest())
        return self._whole.digest()


def send_header(store: Store, request: Request, leaf: Leaf, header: Header) -> Work:
    fields, books = request.fields, store.tree.books
    shared = [shared_len(store, leaf, books.leaf(one)) for one in fields.beside or ()]
    prefix = names_of(store.tree, leaf)
    names = named_pages(prefix)
    if prefix is not None:
        num_named = prefix.num_pages(header.page_size)
        extra = extra_of(prefix, header.page_size) or None
        update = {"num_named": num_named, "cache_salt": prefix.cache_salt, "extra": extra}
        header = header.model_copy(update=update)
    shapes: tuple[Shaped, ...] = tuple((n, one.dtype, one.shape) for n, one in names.items())
    numbers = len(header.lengths) + len(shared)
    room = TEXT_BYTES + NUMBER_BYTES * numbers + EXTRA_BYTES * len(header.extra or ())
    request.place.require(room, shapes)
    digest = header_digest(header, names).hex()
    reply: dict[str, Any] = {"header": header.document(), "digest": digest, "shared": shared}
    laid = request.place.lay(reply, shapes)
    for name, place in laid.items():
        place[...] = names[name]
    return Completed()


def spans_of(header: Header, part: Part) -> list[tuple[int, int, int]]:
    """Layer, first token and the one after the last, for every layer that has rows in a part."""
    start, stop = part.first_page * header.page_size, part.last_page * header.page_size
    spans = [
        (layer, start, min(stop, header.lengths[layer]))
        for layer in range(part.first_layer, part.last_layer)
    ]
    return [(layer, first, last) for layer, first, last in spans if last > first]


def count_rows(spans: Sequence[tuple[int, int, int]]) -> int:
    return sum(last - first for _, first, last in spans)


def pieces(
    store: Store, table: PageTable, spans: Sequence[tuple[int, int, int]], after: int = 0
) -> Iterator[tuple[int, slice, Int32]]:
    """Layer, rows of a part's tensors and their slots, a bounded number of rows at a time.

    Rows of tokens before `after` are skipped.
    """
    at_once, begin = rows_at_once(store), 0
    for layer, first, last in spans:
        for start in range(max(first, after), last, at_once):
            stop = min(start + at_once, last)
            rows = slice(begin + start - first, begin + stop - first)
            yield layer, rows, slots_of(store.tree, table, start, stop)
        begin += last - first


def rows_at_once(store: Store) -> int:
    return max(1, MOVED_AT_ONCE // store.geometry.token_bytes)


def read_part(store: Store, request: Request, table: PageTable, header: Header) -> Work:
    """Copy one part's rows to the answer's place, and compute their digest."""
    fields, geometry = request.fields, store.geometry
    spans = spans_of(header, header.part(fields.part))
    dtype = NUMPY_DTYPES[geometry.dtype]
    shape = (count_rows(spans), geometry.num_kv_heads, geometry.head_dim)
    shapes: tuple[Shaped, ...] = tuple((name, dtype, shape) for name in "kv")
    remedy = "ask for a header with a smaller part_bytes"
    request.place.require(TEXT_BYTES, shapes, remedy)
    laid = request.place.lay({"header": None, "digest": SOME_DIGEST}, shapes)
    k, v = laid["k"], laid["v"]
    digest = PartDigest(bytes.fromhex(fields.before), fields.part)

    def slices() -> Slices:
        for layer, rows, slots in pieces(store, table, spans):
            out = k[rows], v[rows]
            cost = Cost(num_bytes=2.0 * (out[0].nbytes + out[1].nbytes))
            yield Slice(partial(store.backend.read_stored, layer, slots, out), "export", cost)
            digest.update(*out)
        request.place.lay({"header": None, "digest": digest.digest().hex()}, shapes)

    return SlicedWork(slices())


def generation(tree: PrefixTree, leaf: Leaf, instance_id: str) -> str:
    """32 hex digits that change when a sequence's tokens change, and when the pool restarts."""
    books = tree.books
    state = [books.serials[leaf.index].tobytes(), books.lengths[:, leaf.index].tobytes()]
    return sha256(b"".join((instance_id.encode(), *state))).hexdigest()[:32]


def names_of(tree: PrefixTree, leaf: Leaf) -> Prefix | None:
    """The names of a sequence's committed pages: token ids if all are known, else keys."""
    path = named_path(leaf.parent)
    if not path:
        return None
    pages = np.concatenate([node.pages for node in path])
    names = tree.cache.named
    salt = named(path[0]).root.cache_salt
    if all(named(node).with_ids for node in path):
        every = enumerate(pages.tolist() if names.extra else ())
        extra = {at: names.extra[page] for at, page in every if page in names.extra}
        sums = accumulate(len(extra_keys(one)) for one in extra.values())
        beyond = (at for at, total in zip(extra, sums, strict=True) if total > MAX_EXTRA)
        pages = pages[: next(beyond, len(pages))]  # a header has no more of them
        return Prefix(names.token_ids[pages].ravel(), None, salt, extra=extra or None)
    return Prefix(None, names.keys[pages], salt)


def extra_of(prefix: Prefix, page_size: int) -> list[ExtraKey]:
    """The further keys of a prefix, as a request has them."""
    return [
        ExtraKey(first_token=page * page_size + at, key=key.hex())
        for page, material in (prefix.extra or {}).items()
        if page < prefix.num_pages(page_size)
        for at, key in extra_keys(material)
    ]


def slots_of(tree: PrefixTree, table: PageTable, start: int, stop: int) -> Int32:
    """Token slots of tokens `start:stop` of a page table."""
    span = np.array([start], np.int32), np.array([stop - start], np.int32)
    return token_slots((table,), *span, tree.page_size)
