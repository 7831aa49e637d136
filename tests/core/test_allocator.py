"""The page allocator on its own."""

import pytest
from core_pool import int32

from service.core.errors import IntegrityError, OutOfPages
from service.core.pool.allocator import PageAllocator


def test_a_fresh_allocator_hands_out_pages_in_ascending_order() -> None:
    pages = PageAllocator(8)
    assert pages.allocate(3).tolist() == [0, 1, 2]
    assert pages.allocate(2).tolist() == [3, 4]
    assert (pages.num_free, int(pages.held().sum()), pages.num_pages) == (3, 5, 8)


def test_released_pages_are_the_next_to_be_handed_out_in_their_old_order() -> None:
    pages = PageAllocator(8)
    pages.allocate(6)
    pages.release(int32(4, 1, 3))
    assert pages.allocate(4).tolist() == [4, 1, 3, 6]


def test_too_large_an_allocation_takes_nothing_and_says_how_many_are_free() -> None:
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(OutOfPages) as refused:
        pages.allocate(4)
    assert refused.value.args[:3] == (4, 3, 4)
    assert pages.num_free == 3


def test_no_pages_can_be_allocated_and_released() -> None:
    pages = PageAllocator(1)
    assert pages.allocate(0).tolist() == []
    pages.release(int32())
    assert pages.num_free == 1


def test_a_page_is_held_until_it_is_released() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(2)
    pages.release(held[1:])
    assert (pages.num_free, pages.held().tolist()) == (3, [True, False, False, False])
    pages.release(held[:1])
    assert (pages.num_free, pages.held().any()) == (4, False)


def test_all_pages_can_be_taken_and_given_back() -> None:
    pages = PageAllocator(1000)
    pages.release(pages.allocate(1000))
    assert sorted(pages.free_pages.tolist()) == list(range(1000))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (int32(5), "page 5 of 4 released"),
        (int32(-1), "page -1 of 4 released"),
        (int32(3), "free page 3 released"),
        (int32(0, 1, 0), "page 0 released twice at once"),
    ],
)
def test_releasing_a_page_without_holders_is_a_bug_and_changes_nothing(given, message) -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(IntegrityError, match=f"{message}: this is a bug"):
        pages.release(given)
    assert (pages.num_free, pages.held().tolist()) == (1, [True, True, True, False])
