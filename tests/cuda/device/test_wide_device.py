"""The wide kernel alone on a device against float64, dead slots of the pool poisoned with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.cuda.wide_cases import Case, case_variant, groups

pytestmark = pytest.mark.gpu
BAR = {"fp16": 1e-3, "bf16": 1e-2}
LSE_BAR = 1e-3


def published_grid() -> Iterator[Case]:
    """Query and key counts of the usual prefill grids, the other choices taking turns."""
    choices = [
        {"page_size": page, "layout": layout, "causal": causal, "dtype": dtype, "shuffled_rows": s}
        for page, layout, causal, dtype, s in product(
            (16, 32, 64), ("NHD", "HND"), (True, False), ("fp16", "bf16"), (False, True)
        )
    ]
    shapes = product((1, 17, 37, 127, 577), (54, 97, 512, 2048))
    for number, (qo, kv) in enumerate(shapes):
        for turn in range(3):
            chosen = choices[(7 * number + 17 * turn) % len(choices)]
            yield Case(f"{qo} on {kv}", (qo, 1), (kv, kv), **chosen)


def states_are_right(case: Case) -> None:
    from tests.cuda.wide_device import launch_errors

    for error_o, error_lse in launch_errors(case, seed=1):
        assert error_o <= BAR[case.dtype], (error_o, case)
        assert error_lse <= LSE_BAR, (error_lse, case)


@pytest.mark.parametrize("case", list(published_grid()), ids=str)
def test_prefill_grid_equals_the_oracle(case: Case) -> None:
    states_are_right(case)


@pytest.mark.parametrize("case", [case for cases in groups().values() for case in cases], ids=str)
def test_layouts_dims_masks_windows_caps_and_splits_equal_the_oracle(case: Case) -> None:
    states_are_right(case)


def test_items_without_keys_give_the_empty_state() -> None:
    from tests.cuda.wide_device import Bench, load

    case = Case("no keys", (40,), (300,), causal=False)
    variant = case_variant(case)
    bench = Bench(case, variant, seed=1, poison=True)
    bench.items[:, 4] = 0
    bench.launch(load(variant))
    bench.torch.cuda.synchronize()
    bench.merge()
    assert bool((bench.o == 0).all())
    assert bool((bench.lse == -bench.torch.inf).all())
