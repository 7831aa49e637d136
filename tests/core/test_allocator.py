"""The page allocator on its own."""

import pytest
from core_pool import int32

from service.core.errors import IntegrityError, OutOfPages
from service.core.pool.allocator import PageAllocator


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
