"""Creates and describes sequences, and their page tables."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Generator, Sequence
from typing import Final

from service.core.errors import InvalidRequest
from service.core.keys import Prefix
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.core.values import NewSpec, RowCopies, SequenceView
from service.engine.handlers.prefix import prompt_of
from service.engine.handlers.rows import NUMBER_BYTES
from service.engine.handlers.tiers import cached_by_tier, limits_of
from service.engine.store.imports import HIDDEN
from service.engine.store.store import Store
from service.engine.tiers.loading import Loading
from service.engine.tiers.loads import LoadLimits, Origin
from service.engine.work.request import Request
from service.engine.work.work import (
    Completed,
    Counts,
    Fields,
    Seconds,
    SlicedWork,
    Slices,
    Work,
    empty_slice,
    in_slices,
)
from service.image.json_text import dump_json
from service.tenants import Tenant

MADE_AT_ONCE: Final = 32
"""Sequences made or deleted between two reads of the clock: about a millisecond."""
NAMED_AT_ONCE: Final = 4096
"""Token ids or keys of prefixes looked up between two reads of the clock, likewise."""
EVICTED_AT_ONCE: Final = 256
"""Pages evicted for a reserve between two reads of the clock: up to a millisecond or two."""
VIEW_BYTES: Final = 512
"""Room for one sequence in an answer, beside its ids and lengths."""
LONGEST_ID: Final = 128


def create_sequences(store: Store, request: Request, _: Seconds) -> Work:
    """Create sequences or forks; all or none."""
    new, tenant = request.fields.sequences, request.tenant
    if any(one.parent is None for one in new):
        store.refuse_new()
    store.refuse_sequences(tenant.namespace, len(new))
    refuse_reserves(store, tenant.namespace, [one.reserve for one in new])
    fresh = fresh_ids(tenant, sum(one.id is None for one in new))
    names = iter(fresh)
    ids = [next(names) if one.id is None else one.id for one in new]
    text = sum(map(len, ids)) + sum(len(one.parent or "") for one in new)
    request.place.require(view_bytes(store) * len(new) + text)
    made = SequenceBatch(store, request, ids)
    if store.loading is not None:
        made.find_loads(store.loading)
    if made.loads:
        loaded = made.slices()
        return SlicedWork(loaded, made.undo, made=tuple(fresh), undo_slices=made.undo_slices)
    if len(new) <= MADE_AT_ONCE and made.is_short:
        made.some(0, len(new))
        return Completed(counts=made.lay())
    # no counts: they are known only at the end
    return SlicedWork(made.slices(), made.undo, made=tuple(fresh), undo_slices=made.undo_slices)


class SequenceBatch:
    """The sequences of one request, made some at a time; all or none."""

    def __init__(self, store: Store, request: Request, ids: Sequence[str]) -> None:
        self._store, self._request, self._ids = store, request, ids
        self._made: list[str] = []
        self._views: list[str] = []
        self._looked_up = self._found = 0
        self.loads: dict[int, LoadLimits] = {}
        """Sequences for which lower tiers have pages to load."""
        self._origins: dict[str, Origin] = {}

    @property
    def is_short(self) -> bool:
        """Whether prefixes are short enough to be looked up in a fraction of a slice, and none is
        of a parent, whose length is known only once it is made."""
        new, tensors = self._request.fields.sequences, self._request.tensors
        tokens = sum(map(len, tensors.values()))
        named = [one for one in new if one.prefix is not None]
        tokens += sum(len(one.prefix.token_ids or one.prefix.page_keys or ()) for one in named)
        ids = {one.id for one in named} - {None}
        return tokens <= NAMED_AT_ONCE and not any(one.parent in ids for one in new)

    def find_loads(self, loading: Loading) -> None:
        for index, one in enumerate(self._request.fields.sequences):
            prefix = prefix_at(self._store, self._request, index)
            if prefix is not None:
                limits = limits_of(self._store, one.prefix)
                if loading.lookup.has_more(self._request.tenant.namespace, prefix, limits):
                    self.loads[index] = limits

    def _load(self) -> Slices:
        loading, namespace = self._store.loading, self._request.tenant.namespace
        for index, limits in self.loads.items():
            prefix = prefix_at(self._store, self._request, index)
            if loading is not None and prefix is not None:
                origin = yield from loading.load(namespace, prefix, limits)
                self._origins[self._ids[index]] = origin

    def some(self, first: int, last: int) -> None:
        """Make sequences `first:last`, all or none."""
        store, tenant = self._store, self._request.tenant
        specs = [self._spec(index) for index in range(first, last)]
        ids = [spec.id for spec in specs]
        store.refuse_sequences(tenant.namespace, len(specs))
        store.imports.refuse_taken(ids)
        refuse_uneven_parents(store, specs)
        create(store, specs)
        self._made += ids
        for spec in specs:
            self._add_view(spec)

    def _spec(self, index: int) -> NewSpec:
        one, tenant = self._request.fields.sequences[index], self._request.tenant
        prefix = prefix_at(self._store, self._request, index)
        name, namespace = self._ids[index], tenant.namespace
        return NewSpec(name, one.parent, one.length, prefix, namespace, one.ttl_s, one.reserve)

    def _add_view(self, spec: NewSpec) -> None:
        """Add a sequence to the answer, as JSON, and count the tokens found of its prefix."""
        size = self._store.geometry.page_size
        view = sequence_fields(self._store.tree.describe(spec.id), self._request.tenant)
        cached = view["length"] if spec.prefix is not None else 0
        self._found += cached
        self._looked_up += 0 if spec.prefix is None else spec.prefix.num_pages(size) * size
        view["cached_len"] = cached
        if spec.prefix is not None:
            origin = self._origins.get(spec.id)
            view |= cached_by_tier(self._store, cached // size, origin)
        self._views.append(dump_json(view))

    def lay(self) -> Counts:
        """The answer, and how many tokens of prefixes were looked up and found."""
        self._request.place.lay_text(f'{{"sequences":[{",".join(self._views)}]}}')
        return Counts(looked_up=self._looked_up, found=self._found)

    def slices(self) -> Slices:
        yield from self._load()
        yield from in_slices(self._pieces())
        self.lay()
        yield empty_slice()  # the end of a long answer is a turn of its own

    def _pieces(self) -> Generator[None, None, None]:
        at_once = MADE_AT_ONCE if self.is_short else 1
        for first in range(0, len(self._ids), at_once):
            last = min(first + at_once, len(self._ids))
            while not self._has_made(first, last):
                yield
            yield

    def _has_made(self, first: int, last: int) -> bool:
        """Make sequences `first:last`; False where more pages have to be evicted for them."""
        budget = self._store.tree.budget
        budget.most_evicted = EVICTED_AT_ONCE
        try:
            self.some(first, last)
        except EvictionPaused:
            return False
        finally:
            budget.most_evicted = NO_LIMIT
        return True

    def undo(self) -> None:
        for piece in self._undo_pieces():
            del piece

    def undo_slices(self) -> Slices:
        """As `undo`, some at a time."""
        yield from in_slices(self._undo_pieces())

    def _undo_pieces(self) -> Generator[None, None, None]:
        while self._made:
            some, self._made = self._made[-MADE_AT_ONCE:], self._made[:-MADE_AT_ONCE]
            self._store.tree.free(some)
            yield


def refuse_reserves(store: Store, namespace: str, counts: Sequence[int]) -> None:
    """Raises `OutOfPages` where `counts` tokens cannot be reserved, whatever is evicted."""
    budget, size = store.tree.budget, store.geometry.page_size
    needed = sum(count // size for count in counts)
    if store.tree.satellites is not None:
        needed *= store.tree.satellites.per_page
    owner = budget.look(namespace)
    if needed > budget.obtainable(owner):
        raise budget.refusal(owner, needed)


def refuse_uneven_parents(store: Store, specs: Sequence[NewSpec]) -> None:
    """Raises `InvalidRequest` for a fork without a length of a parent with uneven layers: the fork
    would silently lose tokens of the longer ones."""
    books = store.tree.books
    for spec in specs:
        if spec.parent is None or spec.length is not None or spec.parent not in books:
            continue
        lengths = books.lengths[:, books.leaf(spec.parent).index]
        if lengths.min() != lengths.max():
            least, most = int(lengths.min()), int(lengths.max())
            rule = (
                f"its layers hold {least} to {most} tokens, and a fork holds the same at each: "
                f"append to the other layers first, or say length = {least}"
            )
            raise InvalidRequest("parent", spec.parent, rule)


def create(store: Store, specs: Sequence[NewSpec]) -> None:
    """All or none."""
    copies = store.tree.create(specs)
    try:
        copy_rows(store, copies)
    except BaseException:
        store.tree.free([spec.id for spec in specs])
        raise


def prefix_at(store: Store, request: Request, index: int) -> Prefix | None:
    """The prefix of one sequence to make, from its fields or its part of the tensor."""
    fields, tensors = request.fields, request.tensors
    one, spans = fields.sequences[index], fields.prefix_indptr
    if one.prefix is None:
        return None
    if tensors and spans is not None:
        tensors = {name: rows[spans[index] : spans[index + 1]] for name, rows in tensors.items()}
    return prompt_of(store, one.prefix, tensors)


def copy_rows(store: Store, copies: RowCopies) -> None:
    if copies.src_pages.size:
        for group, one in enumerate(store.tree.group_copies(copies)):
            store.backend.copy_rows(one.src_pages, one.dst_pages, one.num_rows, group)


def list_sequences(store: Store, request: Request, _: Seconds) -> Fields:
    """A page of the list; one more is looked up to know whether there are more."""
    fields, tenant = request.fields, request.tenant
    found = store.tree.list(fields.after or tenant.prefix, fields.limit + 1)
    own = [view for view in found if view.id.startswith(tenant.prefix)]
    own = [view for view in own if not view.id.startswith(HIDDEN)]  # these are being imported
    shown = [sequence_fields(view, tenant) for view in own[: fields.limit]]
    following = shown[-1]["id"] if len(own) > fields.limit else None
    return {"sequences": shown, "next": following}


def get_sequence(store: Store, request: Request, _: Seconds) -> Fields:
    return sequence_fields(store.tree.describe(request.fields.id), request.tenant)


def sequence_fields(view: SequenceView, tenant: Tenant) -> Fields:
    return {
        "id": tenant.shown(view.id),
        "length": view.length,
        "lengths": list(view.lengths),
        "pages": view.pages,
        "last_page_len": view.last_page_len,
        "parent": None if view.parent is None else tenant.shown(view.parent),
        "ttl_s": view.ttl_s,
        "reserved_len": view.reserved_len,
        "known_len": view.known_len,
        "committed_len": view.committed_len,
    }


def view_bytes(store: Store) -> int:
    return VIEW_BYTES + 2 * NUMBER_BYTES * store.geometry.num_layers


def fresh_ids(tenant: Tenant, count: int) -> list[str]:
    """Unique ids: 80 random bits each."""
    letters = base64.b32encode(secrets.token_bytes(10 * count)).decode().lower()
    return [f"{tenant.prefix}seq-{letters[at : at + 16]}" for at in range(0, len(letters), 16)]
