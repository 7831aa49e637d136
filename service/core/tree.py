"""The prefix tree: sequences that share whole pages, and every operation that changes them.

An operation that raises has changed nothing: each method checks first, then changes.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace

import numpy as np

from service.core.errors import IntegrityError, InvalidRequest, LengthMismatch, OutOfPages
from service.core.integrity import (
    Pieces,
    Sharing,
    integrity_steps,
    own_integrity_steps,
    sharing_steps,
)
from service.core.keys import Prefix
from service.core.nodes import Leaf
from service.core.page_table import PageTable
from service.core.plans.group_levels import group_table
from service.core.plans.ragged import CsrTable, csr_table, token_slots
from service.core.pool.allocator import PageAllocator
from service.core.pool.budget import Budget, EvictionPaused
from service.core.pool.links import Links
from service.core.pool.named_pages import NamedPages
from service.core.pool.satellites import GroupShape, Satellites
from service.core.prefix.cache import PrefixCache
from service.core.prefix.commits import Commits
from service.core.prefix.naming import PageNaming
from service.core.sequences.books import Ids, SequenceBooks, first_lengths
from service.core.sequences.cuts import Cuts
from service.core.sequences.windows import Windows
from service.core.values import (
    Extension,
    Indices,
    Int32,
    NewSpec,
    RowCopies,
    SequenceView,
    row_copies,
)

# Named here because `PrefixTree` has a method `list`.
Leaves = list[Leaf]
Views = list[SequenceView]


class PrefixTree:
    """All sequences of one pool, `num_layers` layers deep.

    Not thread-safe: one thread owns it. The planner and the integrity check read `allocator`,
    `books` and the leaves' links. `budget` allocates pages within quotas, `cache` finds committed
    pages, `commits` names the pages of sequences, `naming` those whose ids are known,
    by itself, `cuts` cuts sequences, many at once. With several layer groups `satellites` are the
    pages of all but the leading one, whose pages `page_size` and page tables count; `windows`
    returns those of groups with a window, if there is one.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        groups: Sequence[GroupShape] = (),
        window_slack: int = 0,
    ) -> None:
        """`window_slack`: tokens before a window that are kept for a cut. Raises `InvalidRequest`
        for a size below 1, if token slots exceed int32, or for groups that do not fit together."""
        if min(num_pages, page_size, num_layers) < 1:
            given = (num_pages, page_size, num_layers)
            raise InvalidRequest("num_pages, page_size, num_layers", given, "each at least 1")
        if num_pages * page_size > np.iinfo(np.int32).max:
            slots = num_pages * page_size
            raise InvalidRequest("num_pages * page_size", slots, "at most 2**31 - 1")
        self.allocator = PageAllocator(num_pages)
        self.books = SequenceBooks(num_layers)
        self.num_layers = num_layers
        self.page_size = page_size
        self.satellites: Satellites | None = None
        if len(groups) > 1:
            self.satellites = Satellites(num_pages, page_size, num_layers, groups, window_slack)
        named = NamedPages(num_pages, page_size, self.satellites)
        self._named = named
        self.links = Links(named)
        self.budget = Budget(self.allocator, named, self.links)
        self.cache = PrefixCache(self.links, self.budget)
        self.commits = Commits(self.books, self.links, self.budget)
        self.naming = PageNaming(self.books, named, self.commits)
        self.windows: Windows | None = None
        if self.satellites is not None and self.satellites.windows:
            self.windows = Windows(self.books, self.budget, self.satellites)
        self.cuts = Cuts(self.books, self.budget, self.links, self.naming, page_size, self.windows)

    def create(self, new: Sequence[NewSpec]) -> RowCopies:
        """Create sequences; all or none.

        A fork shares its parent's full pages up to its length and gets a fresh page for the rest:
        the caller must execute the returned copies. A parent can be an earlier one of `new`. A
        sequence with a prefix starts with the prefix's longest cached beginning. Pages for
        `reserve` tokens more are kept for each.

        Raises `InvalidRequest`, `SequenceExists`, `UnknownSequence` (parents), `OutOfPages`.
        """
        lengths = first_lengths(self.books, new)
        if self.windows is not None:
            self._check_windows(new, lengths)
        num_tails = sum(length % self.page_size > 0 for length in lengths)
        owner = self.budget.namespace(new[0].namespace) if new else None
        fresh = np.empty(0, np.int32) if owner is None else self.budget.take(owner, num_tails)
        copies: list[tuple[int, int, int]] = []
        written_from: dict[int, int] = {}
        for spec, length in zip(new, lengths, strict=True):
            full, num_rows = divmod(length, self.page_size)
            tail = fresh[len(copies) : len(copies) + (num_rows > 0)]
            parent = None if spec.parent is None else self.books.leaf(spec.parent)
            if spec.prefix is not None:
                self._add_cached(spec, spec.prefix)
                continue
            self._add(spec, parent, length, tail)
            if parent is not None and num_rows:
                # A parent created by this call has no rows yet: copy from its own source.
                page, source = int(tail[0]), parent.table.page(full)
                written_from[page] = source = written_from.get(source, source)
                copies.append((source, page, num_rows))
        if reserving := [spec for spec in new if spec.reserve]:
            leaves = [self.books.leaf(spec.id) for spec in reserving]
            try:
                self.cuts.reserve(leaves, [spec.reserve for spec in reserving])
            except (OutOfPages, EvictionPaused):
                self.free([spec.id for spec in reversed(new)])
                raise
        return row_copies(copies)

    def free(self, ids: Ids) -> None:
        """Delete sequences; pages that nothing else holds become free. All or none.

        Raises `UnknownSequence`, `InvalidRequest` for a duplicate id.
        """
        leaves = self.books.leaves(self.books.look_up_distinct(ids).indices)
        for leaf in leaves:
            self.naming.due.pop(leaf, None)
            self.cuts.lower_reserve(leaf, 0)
            self.cuts.drop_pages(leaf, leaf.start)
            self.links.detach(leaf, leaf.parent)
            self.books.remove(leaf)

    def cut_layer(self, name: str, layer: int, length: int) -> None:
        """Cut one layer to `length` tokens, releasing pages that no layer reaches any more.

        Raises `UnknownSequence`, `InvalidRequest` beyond the layer's length or within shared pages.
        """
        self._check_layer(layer)
        leaf = self.books.leaf(name)
        longest, shared = int(self.books.lengths[layer, leaf.index]), leaf.start * self.page_size
        if not shared <= length <= longest:
            rule = f"{shared} (tokens in shared pages) to {longest} (the layer's length)"
            raise InvalidRequest("length", length, rule)
        if self.windows is not None:
            self.windows.check(leaf, length, group=self.group_of(layer))
        self.books.lengths[layer, leaf.index] = length
        if leaf.chain is not None:
            leaf.chain.known = min(leaf.chain.known, length)
        longest = int(self.books.lengths[:, leaf.index].max())
        self.cuts.drop_pages(leaf, -(-longest // self.page_size))
        self.books.renew(leaf)

    def extend(
        self, layer: int, ids: Ids, counts: Int32, offsets: Int32 | None = None
    ) -> Extension:
        """Add `counts` [B] tokens to sequences at one layer, allocating pages; all or none.

        `offsets` [B] are the lengths that the caller expects.

        Raises `UnknownSequence`, `InvalidRequest`, `LengthMismatch` (with the stored lengths of
        all `ids`), `OutOfPages`.
        """
        self._check_layer(layer)
        batch = self.books.look_up_distinct(ids)
        index = batch.indices
        held = self.books.lengths[layer]  # indexing a row is ten times as fast as two dimensions
        before = held[index]
        if counts.shape != before.shape or (counts < 0).any():
            raise InvalidRequest("counts", counts, f"must be {before.size} numbers, none negative")
        if offsets is not None and not np.array_equal(offsets, before):
            raise LengthMismatch(dict(zip(batch.ids, before.tolist(), strict=True)))
        # In 64 bits until the pool is known to have that many slots.
        wanted = before + counts.astype(np.int64)
        missing = -(-wanted // self.page_size) - self.books.num_pages[index]
        grown = np.flatnonzero(missing > 0)
        self._grow(index[grown], missing[grown])
        lengths = wanted.astype(np.int32)
        held[index] = lengths
        slots = self.layer_slots(layer, self._slots_after(index, before, counts))
        new_pages = missing[grown].astype(np.int32)
        num_pages = self.books.num_pages[index[grown]]
        leaves, got = self.books.leaves(index), self.books.leaves(index[grown])
        return Extension(slots, lengths, layer, leaves, before, got, new_pages, num_pages)

    def extend_layers(
        self, layers: Sequence[int], ids: Ids, counts: Int32, offsets: Int32 | None = None
    ) -> Extension:
        """`extend` at each of `layers`; all or none.

        Raises `InvalidRequest` if a sequence's lengths differ between the layers, and as `extend`.
        """
        self.check_level(layers, ids)
        extension = self.extend(layers[0], ids, counts, offsets)
        if len(layers) > 1:
            others = extension.others = np.array(layers[1:], np.intp)
            columns = np.array([leaf.index for leaf in extension.leaves], np.intp)
            self.books.lengths[np.ix_(others, columns)] = extension.lengths
            if self.satellites is not None:
                slots = self._slots_after(columns, extension.before, counts)
                every = range(len(self.satellites.shapes))
                extension.group_slots = tuple(self.satellites.slots(one, slots) for one in every)
        return extension

    def add_pages(self, name: str, count: int) -> Int32:
        """Allocate pages, int32 [count], behind a sequence's, which are full at every layer.

        The caller writes all of their rows. Raises `UnknownSequence`, `OutOfPages`.
        """
        leaf = self.books.leaf(name)
        first = int(self.books.num_pages[leaf.index])
        self._grow(np.array([leaf.index], np.intp), np.array([count], np.int32))
        self.books.lengths[:, leaf.index] += count * self.page_size
        return leaf.table.read(first, first + count)

    def check_level(self, layers: Sequence[int], ids: Ids) -> None:
        """Raises `InvalidRequest` unless each sequence has one length at all the layers, so that
        one plan serves them."""
        if not 0 <= min(layers) <= max(layers) < self.num_layers:
            raise InvalidRequest("layers", list(layers), f"0 to {self.num_layers - 1}")
        batch = self.books.look_up_distinct(ids)
        lengths = self.books.lengths[np.ix_(np.array(layers, np.intp), batch.indices)]
        uneven = (lengths != lengths[0]).any(axis=0)
        if uneven.any():
            at = int(uneven.argmax())
            low, high = int(lengths[:, at].min()), int(lengths[:, at].max())
            rule = f"has {low} to {high} tokens at the step's layers: its lengths must be equal"
            raise InvalidRequest("sequences", batch.ids[at], rule)

    def undo(self, extension: Extension) -> None:
        """Roll back an extension; of several of the same sequences, the newest first.

        Raises `IntegrityError` if one of its sequences has changed since, was deleted, or shares
        the added tokens.
        """
        books, layers = self.books, np.array([extension.layer], np.intp)
        if extension.others is not None:
            layers = np.concatenate((layers, extension.others))
        index = np.array([leaf.index for leaf in extension.leaves], np.intp)
        grown = np.array([leaf.index for leaf in extension.grown], np.intp)
        same = (
            all(books.holds(leaf) for leaf in extension.leaves)
            and (books.lengths[np.ix_(layers, index)] == extension.lengths).all()
            and np.array_equal(books.num_pages[grown], extension.num_pages)
        )
        if not same:
            raise IntegrityError("cannot roll back an extension: its sequences have changed since")
        kept = extension.num_pages - extension.num_new_pages
        pairs = [*zip(extension.leaves, extension.before.tolist(), strict=True)]
        pairs += zip(extension.grown, (kept * self.page_size).tolist(), strict=True)
        for leaf, length in pairs:
            if leaf.start * self.page_size > length:
                raise IntegrityError(
                    f"cannot roll back an extension of {leaf.id} to {length} tokens: its first "
                    f"{leaf.start} pages are shared"
                )
        books.lengths[np.ix_(layers, index)] = extension.before
        if extension.known is not None:
            self.naming.undo(extension.leaves, extension.known)
        for leaf, count in zip(extension.grown, extension.num_new_pages.tolist(), strict=True):
            self.cuts.drop_pages(leaf, int(books.num_pages[leaf.index]) - count)
            # The next extension can reach the same length on other pages.
            books.renew(leaf)

    def lengths(self, ids: Ids, layer: int) -> Int32:
        """kv_len at `layer`, int32 [B]. Raises `UnknownSequence` with every unknown id."""
        self._check_layer(layer)
        held: Int32 = self.books.lengths[layer][self.books.look_up(ids).indices]
        return held

    def check_lengths(self, ids: Ids, layer: int, offsets: Int32) -> None:
        """Raises `UnknownSequence`, and `LengthMismatch` where kv_len is not `offsets` [B]."""
        lengths = self.lengths(ids, layer)
        if not np.array_equal(offsets, lengths):
            names = self.books.look_up(ids).ids
            raise LengthMismatch(dict(zip(names, lengths.tolist(), strict=True)))

    def read(self, ids: Ids, layer: int) -> tuple[Int32, Leaves]:
        """kv_len at `layer`, int32 [B], and the leaves, which the caller must not change.

        Raises `UnknownSequence` with every unknown id.
        """
        self._check_layer(layer)
        index = self.books.look_up(ids).indices
        return self.books.lengths[layer][index], self.books.leaves(index)

    def page_table(self, ids: Ids, layer: int) -> CsrTable:
        """The whole page tables at a layer. Raises `UnknownSequence`, and `InvalidRequest` for a
        layer with a window, where pages are returned."""
        lengths, leaves = self.read(ids, layer)
        table = csr_table([leaf.table for leaf in leaves], lengths, self.page_size)
        if self.satellites is None:
            return table
        if self.satellites.window_at(layer) is not None:
            rule = "its group has a window, and its pages before it are returned"
            raise InvalidRequest("layer", layer, rule)
        return group_table(self.satellites, self.group_of(layer), table)

    def group_of(self, layer: int) -> int:
        """The layer's group, in the order of the settings."""
        return 0 if self.satellites is None else self.satellites.group_by_layer[layer]

    def page_size_at(self, layer: int) -> int:
        """Tokens of a page of the layer's group."""
        if self.satellites is None:
            return self.page_size
        return self.satellites.shapes[self.satellites.group_by_layer[layer]].page_size

    def tokens_in(self, num_pages: int) -> int:
        """Tokens of one sequence that pages of all groups hold, windows that return some aside."""
        per_page = 1 if self.satellites is None else self.satellites.per_page
        return num_pages // per_page * self.page_size

    def layer_slots(self, layer: int, slots: Int32) -> Int32:
        """Token slots of a layer's group, for `slots` of the leading one."""
        if self.satellites is None:
            return slots
        return self.satellites.slots(self.satellites.group_by_layer[layer], slots)

    def group_copies(self, copies: RowCopies) -> list[RowCopies]:
        """Copies of rows of leading pages, as those of each group's pages."""
        if self.satellites is None:
            return [copies]
        return [self.satellites.copies(at, copies) for at in range(len(self.satellites.shapes))]

    def plan_key(self, ids: Ids, layer: int) -> Hashable:
        """A key whose equality means equal plans for equal queries, also across layers."""
        self._check_layer(layer)
        index = self.books.look_up(ids).indices
        key = self.books.serials[index].tobytes(), self.books.lengths[layer][index].tobytes()
        return key if self.satellites is None else (*key, self.group_of(layer))

    def describe(self, name: str) -> SequenceView:
        """The view of one sequence. Raises `UnknownSequence`."""
        return self._view(self.books.leaf(name))

    def list(self, after: str | None, limit: int) -> Views:
        """Up to `limit` sequences in order of id, after `after` (None: from the first)."""
        return [self._view(leaf) for leaf in self.books.after(after, limit)]

    def _view(self, leaf: Leaf) -> SequenceView:
        known, committed = self.naming.known(leaf), self.naming.num_named(leaf) * self.page_size
        return replace(
            self.books.view(leaf, self.page_size), known_len=known, committed_len=committed
        )

    def tick(self, now: float) -> None:
        """Advance the time to `now` seconds: leases, priorities and soft pins expire."""
        retention = self._named.retention
        self.books.now = retention.now = now
        if self.cache.ends.next_due <= now:
            self.cache.expire(now)
        if retention.ends.next_due <= now:
            retention.expire()

    def integrity_steps(self, namespace: str | None = None) -> Pieces:
        """`check_integrity` in small pieces between which the tree may change; with `namespace`
        only that one's sequences and pages."""
        if namespace is None:
            return integrity_steps(self.books, self.links, self.budget)
        return own_integrity_steps(self.books, self.links, self.budget.look(namespace))

    def check_integrity(self) -> None:
        """Raises `IntegrityError`, with the numbers, if an invariant does not hold."""
        for _ in self.integrity_steps():
            pass

    @property
    def num_sequences(self) -> int:
        return len(self.books)

    def sharing_steps(self, namespace: str) -> Generator[None, None, Sharing]:
        """The sharing among one namespace's sequences, in small pieces between which they may
        change."""
        leaves = list(self.budget.look(namespace).leaves)
        return sharing_steps(self.books, leaves, self.page_size)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise InvalidRequest("layer", layer, f"0 to {self.num_layers - 1}")

    def _check_windows(self, new: Sequence[NewSpec], lengths: Sequence[int]) -> None:
        """Raises `WindowReturned` for forks at lengths whose next row needs returned pages."""
        sources: dict[str, str] = {}
        for spec, length in zip(new, lengths, strict=True):
            if spec.parent is not None:
                sources[spec.id] = source = sources.get(spec.parent, spec.parent)
                if self.windows is not None and source in self.books:
                    self.windows.check(self.books.leaf(source), length)

    def _add(self, spec: NewSpec, parent: Leaf | None, length: int, tail: Int32) -> None:
        """Add a sequence with `parent`'s full pages up to its first length, then `tail`."""
        full = length // self.page_size
        node, table = None, PageTable(own=tail)
        if parent is not None:
            node = self.links.node_ending_at(parent, full)
            held = int(self.books.num_pages[parent.index])
            table = parent.table.fork(held, full, tail, self.books.blocks)
        owner = self.budget.namespace(spec.namespace)
        leaf = self.books.add(spec, owner, length, table)
        self.links.attach(leaf, node)
        if parent is not None and parent.chain is not None:
            self.naming.fork(parent, leaf, length)

    def _add_cached(self, spec: NewSpec, prefix: Prefix) -> None:
        """Add a sequence with the longest cached beginning of `prefix`."""
        found = self.cache.match(spec.namespace, prefix)
        node = found.cut(self.links)
        table = PageTable.of(found.table(), self.books.blocks)
        owner = self.budget.namespace(spec.namespace)
        length = found.num_pages * self.page_size
        leaf = self.books.add(spec, owner, length, table)
        self.links.attach(leaf, node)
        self.naming.begin(leaf, prefix, found.num_pages)

    def _grow(self, grown: Indices, missing: Int32) -> None:
        """Give each leaf of the columns `grown` the fresh pages that it is `missing`."""
        if grown.size == 0:
            return
        leaves, held = self.books.leaves(grown), self.books.num_pages[grown].tolist()
        pages = self.budget.take_for(leaves, missing)
        ends = np.cumsum(missing)
        if pages.size == grown.size:
            for leaf, have, page in zip(leaves, held, pages.tolist(), strict=True):
                leaf.table.push_one(have, page)
        else:
            pieces = [pages] if grown.size == 1 else np.split(pages, ends[:-1])
            for leaf, have, piece in zip(leaves, held, pieces, strict=True):
                leaf.table.push(have, piece)
        self.books.num_pages[grown] += missing
        self.books.last_page[grown] = pages[ends - 1]

    def _slots_after(self, index: Indices, before: Int32, counts: Int32) -> Int32:
        """Slots of the `counts` tokens after `before`, whose pages are allocated."""
        first = before // self.page_size
        if (counts == 1).all() and (first == self.books.num_pages[index] - 1).all():
            # A decode step writes into last pages only: no table is read.
            slots: Int32 = (self.books.last_page[index] - first) * self.page_size + before
            return slots
        tables = [leaf.table for leaf in self.books.leaves(index)]
        return token_slots(tables, before, counts, self.page_size)
