"""Columns of padded batches, masks and shared prefixes, without a service."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnd.transformers.attention import attnd_mask, checked_mask
from attnd.transformers.columns import Columns, hide, mask_of, plan
from attnd.transformers.prefixes import rows_under, stored_columns, tree_of
from numpy.typing import NDArray
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

pytestmark = pytest.mark.long


def bools(*rows: str) -> NDArray[np.bool_]:
    """Rows of columns: `x` is stored or visible."""
    return np.array([[sign == "x" for sign in row] for row in rows])


def empty(rows: int) -> Columns:
    return Columns(np.zeros((rows, 0), np.bool_))


def test_a_forward_without_padding_takes_every_column() -> None:
    forward = plan(empty(2), bools("xxx", "xxx"), 3)
    assert (forward.rows, forward.indptr, forward.offsets) == ((0, 1), [0, 3, 6], [0, 0])
    assert forward.take is None
    assert forward.after.covered == 3


def test_padding_is_left_out_wherever_it_is() -> None:
    forward = plan(empty(3), bools(".xx", "xxx", "x.x"), 3)
    assert (forward.rows, forward.indptr) == ((0, 1, 2), [0, 2, 5, 7])
    assert forward.take is not None
    assert forward.take.tolist() == [1, 2, 3, 4, 5, 6, 8]


def test_a_row_of_padding_alone_takes_no_part() -> None:
    before = Columns(bools(".x", "xx"), 2)
    forward = plan(before, bools(".x.", "xxx"), 1)
    assert (forward.rows, forward.indptr, forward.offsets) == ((1,), [0, 1], [2])
    unchanged = plan(before, bools(".x.", "xx."), 1)
    assert (unchanged.rows, unchanged.tokens) == ((), 0)
    assert unchanged.after.covered == 3


def test_shared_columns_of_a_row_are_not_stored_again() -> None:
    before = Columns(bools("xxx..", ".xxx."), 3)
    forward = plan(before, bools("xxxxx", ".xxxx"), 2)
    assert (forward.indptr, forward.offsets) == ([0, 2, 3], [3, 3])
    assert forward.take is not None
    assert forward.take.tolist() == [0, 1, 3]


def test_chunks_of_a_prefill_add_up_to_the_whole() -> None:
    mask, columns, offsets = bools("..xxxxx", "xxxxxxx", ".xxxxxx"), empty(3), []
    columns = Columns(bools("..xx...", "xx.....", ".xx...."), 2)
    for end in (3, 6, 7):
        forward = plan(columns, mask[:, :end], end - columns.covered)
        offsets.append(forward.offsets)
        columns = forward.after
    assert columns.stored.tolist() == mask.tolist()
    assert columns.lengths.tolist() == [5, 7, 6]


def test_a_mask_that_shows_a_hidden_column_is_refused() -> None:
    with pytest.raises(ValueError, match="shows column 0 of row 1, which was hidden"):
        plan(Columns(bools("xx", ".x"), 2), bools("xxx", "xxx"), 1)


def test_a_mask_of_another_size_is_refused_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"attention_mask is \[2, 2\], not \[2, 3\]"):
        mask_of(torch.ones(2, 2, dtype=torch.bool), Columns(bools("xx", "xx"), 2), 1)


def test_the_last_tokens_of_a_row_can_be_hidden_later() -> None:
    columns = Columns(bools("xxxx", ".xxx"), 4)
    assert hide(columns, bools("xxxxx", ".xxxx")) is columns
    hidden = hide(columns, bools("xx..x", ".xxxx"))
    assert hidden.lengths.tolist() == [2, 3]
    assert plan(hidden, bools("xx..x", ".xxxx"), 1).offsets == [2, 3]


def test_a_token_that_others_have_attended_cannot_be_hidden() -> None:
    with pytest.raises(ValueError, match="hides a token of row 0 that its token in column 3"):
        hide(Columns(bools("xxxx"), 4), bools("xx.xx"))


def test_cropping_forgets_columns_of_every_row() -> None:
    columns = Columns(bools("xxxx", "...x"), 4).crop(2)
    assert (columns.covered, columns.lengths.tolist()) == (2, [2, 0])
    assert columns.crop(5).covered == 0


def test_causal_masks_are_noted_with_their_window() -> None:
    padding = torch.ones(2, 5, dtype=torch.bool)
    plain = attnd_mask(mask_function=causal_mask_function, attention_mask=padding)
    assert (plain.visible is padding, plain.window_left) == (True, -1)
    for window in (1, 2, 9):
        function = sliding_window_causal_mask_function(window)
        assert attnd_mask(mask_function=function, local_size=window).window_left == window - 1


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (bidirectional_mask_function, None),
        (sliding_window_bidirectional_mask_function(4), 4),
        (chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)), 4),
        (sliding_window_causal_mask_function(5), 4),
        (and_masks(causal_mask_function), None),
    ],
    ids=["both ways", "a window both ways", "chunks", "another window", "unknown"],
)
def test_other_masks_are_refused_where_a_layer_attends_with_them(
    function: object, window: int | None
) -> None:
    made = attnd_mask(mask_function=function, local_size=window)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attnd serves causal attention with padding"):
        checked_mask(made, window)


def test_a_window_of_no_key_is_refused_by_its_name() -> None:
    made = attnd_mask(mask_function=sliding_window_causal_mask_function(0), local_size=0)
    with pytest.raises(ValueError, match="sliding_window is 0, in which no key is visible"):
        checked_mask(made, 0)


def test_a_model_that_overlays_the_causal_mask_is_refused() -> None:
    for options in ({"use_vmap": True}, {"allow_is_causal_skip": False}):
        made = attnd_mask(mask_function=causal_mask_function, **options)
        with pytest.raises(ValueError, match="a mask of its own making"):
            checked_mask(made, None)


def test_prompts_share_in_a_tree() -> None:
    a, b, c = [1] * 10, [2] * 10, [3] * 10
    tree = tree_of([a + b + [4], a + b + [5], a + c + [6], a + c + [7], a], range(5), 0, 4)
    assert (tree.length, tree.rows) == (9, (4,))
    assert [(child.length, child.rows) for child in tree.children] == [(20, (0, 1)), (20, (2, 3))]


def test_too_short_a_beginning_is_not_shared_but_what_follows_may_be() -> None:
    a, b = [1, 1], [2] * 10
    tree = tree_of([a + b + [4], a + b + [5], [*a, 6]], range(3), 0, 4)
    assert (tree.length, tree.rows) == (0, (2,))
    assert [(child.length, child.rows) for child in tree.children] == [(12, (0, 1))]


@pytest.mark.parametrize("prompts", [[[1]], [[1], []], [[1, 2]] * 3, [[1, 2, 3], [1, 2]]])
def test_every_prompt_keeps_its_last_token_to_itself(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts, range(len(prompts)), 0, 1)
    assert sorted(rows_under(tree)) == list(range(len(prompts)))
    assert tree.length <= max(min(map(len, prompts)) - 1, 0)


def test_a_forward_begins_at_the_first_column_that_a_row_lacks() -> None:
    columns = stored_columns(bools("...xxxx", "xxxxxxx"), [3, 3])
    assert columns.covered == 3
    assert columns.stored.tolist() == bools("...xxx.", "xxx....").tolist()
