"""A prefix tree with a pool of plain token numbers, to read written tokens back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.core.plans.plan import CascadePlan
from service.core.plans.ragged import token_slots
from service.core.pool.satellites import GroupShape
from service.core.tree import PrefixTree
from service.core.values import Int32, NewSpec, RowCopies

EMPTY = -1


def int32(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def truncate(tree: PrefixTree, name: str, length: int) -> RowCopies:
    """Cut every layer of one sequence; the caller executes the copies."""
    cuts = tree.cuts.prepare((name,), (length,))
    copies = tree.cuts.copies(cuts)
    tree.cuts.finish(cuts)
    return copies


def slots_of(tree: PrefixTree, name: str, layer: int = 0) -> Int32:
    """The token slots of a sequence, negative where its page was returned."""
    lengths, leaves = tree.read([name], layer)
    slots = token_slots([leaves[0].table], np.zeros_like(lengths), lengths, tree.page_size)
    return tree.layer_slots(layer, slots)


def check_blocks(tree: PrefixTree) -> None:
    """Equal blocks of page tables are one array."""
    known: dict[bytes, int] = {}
    for leaf in tree.books:
        table = leaf.table
        assert table.base == sum(block.size for block in table.shared)
        assert table.base <= tree.books.num_pages[leaf.index]
        for block in table.shared:
            assert known.setdefault(block.tobytes(), id(block)) == id(block)


class TokenPool:
    """One token number per slot and layer; unwritten slots, and those of free pages once `poison`
    was called, are `EMPTY`."""

    def __init__(
        self,
        num_pages: int = 32,
        page_size: int = 4,
        num_layers: int = 1,
        groups: Sequence[GroupShape] = (),
        window_slack: int = 0,
    ) -> None:
        self.tree = PrefixTree(num_pages, page_size, num_layers, groups, window_slack)
        self.page_size = page_size
        self.stored = np.full((num_layers, num_pages * page_size), EMPTY, dtype=np.int64)

    @property
    def layers(self) -> range:
        return range(self.tree.num_layers)

    def create(self, *specs: NewSpec) -> RowCopies:
        copies = self.tree.create(specs)
        self._copy(copies)
        return copies

    def fork(self, name: str, parent: str, length: int | None = None) -> RowCopies:
        return self.create(NewSpec(name, parent, length))

    def truncate(self, name: str, length: int) -> RowCopies:
        copies = truncate(self.tree, name, length)
        self._copy(copies)
        return copies

    def cut_many(
        self, names: Sequence[str], lengths: Sequence[int], keeps: Sequence[Sequence[int]]
    ) -> None:
        """Cut sequences to a length and the tokens at `keeps` behind it; rows move one by one."""
        arrays = [np.array(keep, np.int32) for keep in keeps]
        cuts = self.tree.cuts.prepare(names, lengths, arrays, batch=True)
        sources, targets = self.tree.cuts.moves(cuts)
        for layer in self.layers:
            to = self.tree.layer_slots(layer, targets)
            for source, target in zip(self.tree.layer_slots(layer, sources), to, strict=True):
                self.stored[layer, target] = self.stored[layer, source]
        self._copy(self.tree.cuts.copies(cuts))
        self.tree.cuts.finish(cuts)

    def append(self, name: str, tokens: Sequence[int], layers: Sequence[int] | None = None) -> None:
        """The same tokens at each of the layers (all by default)."""
        for layer in self.layers if layers is None else layers:
            extension = self.tree.extend(layer, [name], int32(len(tokens)))
            self.stored[layer, extension.slots] = tokens

    def start(self, name: str, tokens: Sequence[int]) -> None:
        """A new sequence with `tokens` at every layer."""
        self.create(NewSpec(name))
        self.append(name, tokens)

    def read(self, name: str, layer: int = 0) -> list[int]:
        """The sequence's tokens, found by its page table."""
        table = self.tree.page_table([name], layer)
        size = self.tree.page_size_at(layer)
        slots = self._slots(table.kv_indices, int(table.kv_last_page_len[0]), size)
        tokens: list[int] = self.stored[layer, slots].tolist()
        return tokens

    def read_slots(self, name: str, layer: int = 0) -> list[int]:
        """The sequence's tokens, found by its token slots; `EMPTY` for returned pages."""
        slots = slots_of(self.tree, name, layer)
        tokens: list[int] = np.where(slots < 0, EMPTY, self.stored[layer, slots]).tolist()
        return tokens

    def poison(self) -> None:
        """Overwrite the free pages."""
        free = self.tree.allocator.free_pages
        for layer in self.layers:
            size = self.tree.page_size_at(layer)
            self.stored[layer, self._slots(free, size, size)] = EMPTY

    def pages(self, name: str, layer: int = 0) -> list[int]:
        pages: list[int] = self.tree.page_table([name], layer).kv_indices.tolist()
        return pages

    def expand(self, plan: CascadePlan, causal: bool, layer: int = 0) -> list[list[list[int]]]:
        """What each row of the request sees: `[position, token]` in order of level and page."""
        num_rows = plan.positions.size
        rows: list[list[list[int]]] = [[] for _ in range(num_rows)]
        order = range(num_rows) if plan.order is None else plan.order.tolist()
        for level in plan.levels:
            assert level.qo_indptr[0] == 0
            assert level.qo_indptr[-1] == num_rows
            for s, last in enumerate(level.kv_last_page_len.tolist()):
                pages = level.kv_indices[level.kv_indptr[s] : level.kv_indptr[s + 1]]
                assert (1 <= last <= plan.page_size) if pages.size else last == 0
                tokens = self.stored[layer, self._slots(pages, last, plan.page_size)]
                seen = np.stack((level.kv_start[s] + np.arange(tokens.size), tokens), axis=1)
                for row in range(level.qo_indptr[s], level.qo_indptr[s + 1]):
                    hidden = seen[:, 0] > plan.positions[row]
                    assert not (causal and hidden.any() and not level.causal)
                    rows[order[row]] += seen[~(hidden & level.causal)].tolist()
        return rows

    def free_all(self) -> None:
        self.tree.free([view.id for view in self.tree.list(None, 1 << 20)])

    def _slots(self, pages: Int32, last_page_len: int, size: int) -> Int32:
        slots = pages[:, np.newaxis] * size + np.arange(size)
        count = pages.size * size - (size - last_page_len) * (pages.size > 0)
        return slots.ravel()[:count].astype(np.int32)

    def _copy(self, copies: RowCopies) -> None:
        assert not set(copies.src_pages.tolist()) & set(copies.dst_pages.tolist())
        for group, one in enumerate(self.tree.group_copies(copies)):
            layers = [at for at in self.layers if self.tree.group_of(at) == group]
            size = self.tree.page_size_at(layers[0])
            columns = (one.src_pages, one.dst_pages, one.num_rows)
            for source, to, rows in zip(*(column.tolist() for column in columns), strict=True):
                a, b = source * size, to * size
                self.stored[layers, b : b + rows] = self.stored[layers, a : a + rows]
