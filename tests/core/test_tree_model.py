"""Random changes to a prefix tree, against lists of tokens in a dict."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from core_pool import TokenPool, check_blocks, int32
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service.core import page_table
from service.core.errors import (
    CoreError,
    InvalidRequest,
    LengthMismatch,
    OutOfPages,
    SequenceExists,
    UnknownSequence,
    WindowReturned,
)
from service.core.plans.plan import make_plan
from service.core.pool.satellites import GroupShape
from service.core.values import NewSpec

NUM_PAGES = 24
NUM_LAYERS = 2
WINDOWS = st.none() | st.integers(1, 7)
ALL_NAMES = list("abcdefg")
NAMES = st.sampled_from(ALL_NAMES)
COUNTS = st.integers(0, 9)
LENGTHS = st.integers(0, 20)
RESERVES = st.sampled_from([0, 0, 3, 9])
SPECS = st.builds(NewSpec, NAMES, st.none() | NAMES, st.none() | LENGTHS, reserve=RESERVES)


class TreeAgainstLists(RuleBasedStateMachine):
    """`model[name][layer]` is the list of tokens that a sequence holds at a layer, `reserved[name]`
    the length up to which pages are kept for it, `settled[name]` the most tokens after which it, or
    one that it shares pages with, has returned pages."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        length=st.integers(0, 12),
        block_pages=st.sampled_from([1, 2, 3, 512]),
        groups=st.none() | st.tuples(WINDOWS, st.booleans(), st.integers(0, 3)),
    )
    def start(
        self,
        page_size: int,
        length: int,
        block_pages: int,
        groups: tuple[int | None, bool, int] | None,
    ) -> None:
        """A small family, so that there is something to share from the first step on. `groups`: the
        window of a second group, whether it comes first, and the slack."""
        page_table.BLOCK_PAGES = block_pages
        self.page_size = page_size
        self.per_page, self.window, self.slack = 1, None, 0
        shapes: list[GroupShape] = []
        if groups is not None:
            self.window, is_first, self.slack = groups
            small = page_size // 2 if page_size % 2 == 0 else page_size
            shapes = [GroupShape((0,), page_size), GroupShape((1,), small, self.window)]
            shapes = shapes[::-1] if is_first and self.window else shapes
            self.per_page = 1 + page_size // small
        self.pool = TokenPool(NUM_PAGES * self.per_page, page_size, NUM_LAYERS, shapes, self.slack)
        self.settled: dict[str, int] = {}
        self.model: dict[str, list[list[int]]] = {}
        self.reserved: dict[str, int] = {}
        self.tokens = itertools.count()
        self.planned: dict[object, object] = {}
        self.create([NewSpec("a")])
        for layer in range(NUM_LAYERS):
            self.append(layer, {"a": length}, undone=False)
        self.create([NewSpec("b", "a"), NewSpec("c", "a", length // 2)])

    # Rules. What must be refused is known from the model alone, before the tree is asked.

    @rule(specs=st.lists(SPECS, min_size=1, max_size=3))
    def create_any(self, specs: list[NewSpec]) -> None:
        self.create(specs)

    def create(self, specs: list[NewSpec]) -> None:
        made: dict[str, list[list[int]]] = {}
        error: type[CoreError] | None = None
        if len({spec.id for spec in specs}) < len(specs):
            error = InvalidRequest
        elif any(spec.id in self.model for spec in specs):
            error = SequenceExists
        else:
            for spec in specs:
                parent = (self.model | made).get(spec.parent or "")
                length = spec.length
                if parent is not None and length is None:
                    length = min(map(len, parent))
                if spec.parent is not None and parent is None:
                    error = error or UnknownSequence
                elif (length or 0) > (0 if parent is None else min(map(len, parent))):
                    error = InvalidRequest
                made[spec.id] = [
                    tokens[: length or 0] for tokens in parent or [[] for _ in range(NUM_LAYERS)]
                ]
        if error is not None:
            # Of two reasons to refuse either may be given.
            self.refused((UnknownSequence, error), lambda: self.pool.create(*specs))
            return
        tails = sum(len(tokens[0]) % self.page_size > 0 for tokens in made.values())
        ends = {one.id: len(made[one.id][0]) + one.reserve for one in specs if one.reserve}
        kept = sum(self.num_pages(end) - self.num_pages(len(made[n][0])) for n, end in ends.items())
        if (tails + kept) * self.per_page > self.free_pages:
            self.refused((OutOfPages, WindowReturned), lambda: self.pool.create(*specs))
            return
        try:
            copies = self.pool.create(*specs)
        except WindowReturned as error:
            self.is_justified(error)
            return
        assert len(copies) == tails
        settled = self.settled | dict.fromkeys(made, 0)
        for one in specs:
            settled[one.id] = settled.get(one.parent or "", 0)
        self.settled = settled
        self.model |= made
        self.reserved |= dict.fromkeys(made, 0) | ends

    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS - 1), undone=st.booleans())
    def append_some(self, data: st.DataObject, layer: int, undone: bool) -> None:
        names = self.draw_names(data)
        counts = data.draw(st.lists(COUNTS, min_size=len(names), max_size=len(names)))
        self.append(layer, dict(zip(names, counts, strict=True)), undone)

    def append(self, layer: int, counts: dict[str, int], undone: bool) -> None:
        ids, added = list(counts), int32(*counts.values())
        call = lambda: self.pool.tree.extend(layer, ids, added)  # noqa: E731
        if not counts.keys() <= self.model.keys():
            self.refused(UnknownSequence, call)
            return
        needed = 0
        for name, count in counts.items():
            held = self.num_pages(max(map(len, self.model[name])))
            held = max(held, self.num_pages(self.reserved[name]))
            needed += max(0, self.num_pages(len(self.model[name][layer]) + count) - held)
        needed *= self.per_page
        if needed > self.free_pages:
            refusal = self.refused(OutOfPages, call)
            assert refusal.args[:2] == (needed, self.free_pages)
            return
        extension = call()
        tokens = [[next(self.tokens) for _ in range(count)] for count in counts.values()]
        self.pool.stored[layer, extension.slots] = [*itertools.chain(*tokens)]
        if undone:
            self.pool.tree.undo(extension)
            return
        for name, new in zip(ids, tokens, strict=True):
            self.model[name][layer] += new
        assert extension.lengths.tolist() == [len(self.model[name][layer]) for name in ids]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num_forks=st.integers(1, 3))
    def fork(self, data: st.DataObject, num_forks: int) -> None:
        names = [name for name in ALL_NAMES if name not in self.model][:num_forks]
        lengths = {name: min(map(len, layers)) for name, layers in self.model.items()}
        specs = []
        for name in names:
            parent = data.draw(st.sampled_from(sorted(lengths)))
            lengths[name] = data.draw(st.integers(0, lengths[parent]))
            reserve = data.draw(RESERVES)
            specs.append(NewSpec(name, parent, lengths[name], reserve=reserve))
        self.create(specs)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=COUNTS)
    def append_at_every_layer(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        longest = max(map(len, self.model[name]))
        for layer, tokens in enumerate(self.model[name]):
            self.append(layer, {name: longest + count - len(tokens)}, undone=False)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS - 1), off_by=st.sampled_from([-1, 2]))
    def append_at_a_wrong_offset(self, data: st.DataObject, layer: int, off_by: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        lengths = [len(self.model[name][layer]) for name in ids]
        believed = int32(*lengths)
        believed[-1] += off_by
        ones = np.ones_like(believed)
        refusal = self.refused(
            LengthMismatch, lambda: self.pool.tree.extend(layer, ids, ones, believed)
        )
        assert refusal.extra["lengths"] == dict(zip(ids, lengths, strict=True))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.draw_names(data)[0]
        longest = min(map(len, self.model.get(name, [[]])))
        length = data.draw(st.integers(0, longest + 1))
        if name not in self.model:
            self.refused(UnknownSequence, lambda: self.pool.truncate(name, length))
            return
        if length > min(map(len, self.model[name])):
            self.refused(InvalidRequest, lambda: self.pool.truncate(name, length))
            return
        before = self.seen()
        try:
            self.pool.truncate(name, length)
        except OutOfPages:
            assert self.free_pages < self.per_page
            assert self.pool.tree.books.leaf(name).reserve.size == 0
            assert length % self.page_size > 0
            assert self.seen() == before
            return
        except WindowReturned as error:
            self.is_justified(error)
            assert self.seen() == before
            return
        for tokens in self.model[name]:
            del tokens[length:]
        self.reserve_is_lower_behind_shared_pages([name])

    @rule(data=st.data())
    def cut_many(self, data: st.DataObject) -> None:
        names = self.draw_names(data)
        longest = [min(map(len, self.model.get(name, [[]]))) for name in names]
        lengths = [data.draw(st.integers(0, one + (one % 7 == 6))) for one in longest]
        keeps = [
            sorted(data.draw(st.sets(st.integers(length, most - 1), max_size=6)))
            if length < most
            else []
            for length, most in zip(lengths, longest, strict=True)
        ]
        call = lambda: self.pool.cut_many(names, lengths, keeps)  # noqa: E731
        if not set(names) <= self.model.keys():
            self.refused(UnknownSequence, call)
            return
        if any(length > most for length, most in zip(lengths, longest, strict=True)):
            self.refused(InvalidRequest, call)
            return
        before = self.seen()
        try:
            call()
        except OutOfPages as error:
            assert error.args[0] > self.free_pages
            assert self.seen() == before
            return
        except WindowReturned as error:
            self.is_justified(error)
            assert self.seen() == before
            return
        for name, length, keep in zip(names, lengths, keeps, strict=True):
            for tokens in self.model[name]:
                tokens[length:] = [tokens[at] for at in keep]
        self.reserve_is_lower_behind_shared_pages(names)

    def reserve_is_lower_behind_shared_pages(self, names: list[str]) -> None:
        """A cut may lower reserves, whose pages were those of others."""
        for name in names:
            left = self.pool.tree.describe(name).reserved_len
            assert left <= self.reserved[name]
            self.reserved[name] = left

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=COUNTS)
    def lower_a_reserve(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.tree.cuts.lower_reserve(self.pool.tree.books.leaf(name), count)
        end = min(map(len, self.model[name])) + count if count else 0
        self.reserved[name] = min(self.reserved[name], end)

    @precondition(lambda self: self.model and self.window)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """What a window has passed is returned, and pages that a sequence has for itself stay no
        longer."""
        tree = self.pool.tree
        names = [name for name in self.draw_names(data) if name in self.model]
        leaves = [tree.books.leaf(name) for name in names]
        tree.windows.settle(leaves)
        for name, leaf in zip(names, leaves, strict=True):
            length = min(map(len, self.model[name]))
            self.settled[name] = max(self.settled[name], length)
            if leaf.start == 0:
                spread = max(map(len, self.model[name])) - length
                pages = leaf.table.read(0, self.num_pages(length + spread))
                held = tree.satellites.has(tree.satellites.windows[0], pages)
                most = self.num_pages(self.window + self.slack + spread) + 1
                assert np.count_nonzero(held) <= most

    def is_justified(self, error: WindowReturned) -> None:
        """Only pages that a window has passed were returned."""
        numbers = error.extra
        most = self.settled[numbers["sequences"][0]] - self.window - self.slack
        assert self.window == numbers["window"]
        assert numbers["first"] < numbers["kept"] <= most

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        names = self.draw_names(data)[:2]
        if not set(names) <= self.model.keys():
            self.refused(UnknownSequence, lambda: self.pool.tree.free(names))
            return
        self.pool.tree.free(names)
        for name in names:
            del self.model[name]

    # What holds after every step.

    @invariant()
    def the_books_are_right(self) -> None:
        tree = self.pool.tree
        tree.check_integrity()
        check_blocks(tree)
        assert [view.id for view in tree.list(None, 100)] == sorted(self.model)
        for name, layers in self.model.items():
            view = tree.describe(name)
            assert view.lengths == tuple(map(len, layers)), name
            assert view.pages == self.num_pages(max(view.lengths)), name
            assert view.reserved_len == self.reserved[name]
            kept = max(0, self.num_pages(view.reserved_len) - view.pages)
            assert tree.books.leaf(name).reserve.size == kept

    @invariant()
    def every_sequence_reads_back(self) -> None:
        self.pool.poison()
        for name, layers in self.model.items():
            for layer, tokens in enumerate(layers):
                first = self.first_seen(layer, len(tokens), min(map(len, layers)))
                found = self.pool.read_slots(name, layer)
                assert found[first:] == tokens[first:], (name, layer)
                if not self.is_windowed(layer):
                    assert self.pool.read(name, layer) == tokens, (name, layer)

    def is_windowed(self, layer: int) -> bool:
        return self.window is not None and layer == 1

    def first_seen(self, layer: int, length: int, settled: int) -> int:
        """The first token whose page a layer certainly has."""
        if not self.is_windowed(layer) or self.window is None:
            return 0
        return max(0, min(length, settled) - self.window + 1)

    @invariant()
    def levels_and_flat_table_read_the_same(self) -> None:
        ids = list(self.model)
        qo_indptr = np.arange(len(ids) + 1, dtype=np.int32)
        for layer in range(NUM_LAYERS):
            key = self.pool.tree.plan_key(ids, layer)
            try:
                plan = make_plan(self.pool.tree, ids, layer, qo_indptr, True, "always")
            except WindowReturned as error:  # a cut or fork may lack the last row's first key only
                length = len(self.model[error.extra["sequences"][0]][layer])
                assert error.extra["kept"] - 1 == error.extra["first"] == length - self.window
                continue
            expected = [list(map(list, enumerate(self.model[name][layer]))) for name in ids]
            if self.is_windowed(layer):  # a row is its sequence's last
                begins = [max(0, len(row) - self.window) for row in expected]
                sizes = zip(expected, begins, strict=True)
                expected = [row[at - at % self.page_size :] for row, at in sizes]
            assert self.pool.expand(plan, True, layer) == expected
            levels = [
                (level.kv_indices.tolist(), level.kv_indptr.tolist(), level.qo_indptr.tolist())
                for level in plan.levels
            ]
            assert self.planned.setdefault(key, levels) == levels, "one key, two plans"

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.free_all()
            self.pool.tree.check_integrity()
            assert self.free_pages == NUM_PAGES * self.per_page
            assert self.pool.tree.links.count == 0

    # Helpers.

    def draw_names(self, data: st.DataObject) -> list[str]:
        """One to four names, nearly always of sequences that exist."""
        known = st.sampled_from(sorted(self.model) or ALL_NAMES)
        names = known | known | known | known | known | NAMES
        return data.draw(st.lists(names, min_size=1, max_size=4, unique=True))

    @property
    def free_pages(self) -> int:
        return self.pool.tree.allocator.num_free

    def num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def seen(self) -> list[object]:
        """All that a caller can see of the tree."""
        tree, ids = self.pool.tree, list(self.model)
        keys = [tree.plan_key(ids, layer) for layer in range(NUM_LAYERS)]
        layers = [layer for layer in range(NUM_LAYERS) if not self.is_windowed(layer)]
        pages = [self.pool.pages(name, layer) for name in ids for layer in layers]
        free = tree.allocator.free_pages.tolist()
        free = free if self.per_page == 1 else sorted(free)  # pages of a call are freed one by one
        return [tree.list(None, 100), keys, pages, free, tree.links.count]

    def refused(self, error, call):
        """The refusal, which must have changed nothing."""
        before = self.seen()
        with pytest.raises(error) as refusal:
            call()
        assert self.seen() == before
        return refusal.value


@pytest.fixture(autouse=True)
def block_pages(monkeypatch):
    """Every example sets its own."""
    monkeypatch.setattr(page_table, "BLOCK_PAGES", page_table.BLOCK_PAGES)


@pytest.mark.timeout(600)  # ten seconds of CPU time, more on a busy machine
@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.long)])
def test_any_history_of_changes_leaves_what_lists_in_a_dict_would_hold(examples: int) -> None:
    run_state_machine_as_test(
        TreeAgainstLists,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
