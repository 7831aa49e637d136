"""Tables of visible key tiles, host side: sizes, struct layouts, the kernel that fills them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.compile import ARCHITECTURES, SOURCES, compile_spec
from kernels.cuda import visible


def items_of(*num_keys: int) -> np.ndarray:
    items = np.zeros((len(num_keys), 8), np.int32)
    items[:, 4] = num_keys
    return items


@pytest.mark.parametrize(
    ("num_keys", "words"), [((0,), 1), ((4096,), 1), ((4097,), 2), ((5, 20000, 1), 5)]
)
def test_a_table_has_words_for_the_longest_run_of_any_item(
    num_keys: tuple[int, ...], words: int
) -> None:
    assert visible.table_words(items_of(*num_keys), 128) == words
    assert visible.table_bytes(items_of(*num_keys), 128) == 8 * words * len(num_keys)


def fields(source: str, struct: str) -> list[tuple[str, bool]]:
    """Names of a struct's fields, and whether they are pointers."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", (SOURCES / source).read_text(), re.DOTALL)
    assert body is not None
    found = re.findall(r"^  [\w ]+?(\*?) (\w+);", body[1], re.MULTILINE)
    return [(name, star == "*") for star, name in found]


@pytest.mark.parametrize(
    ("source", "struct", "dtype"),
    [
        ("visible.cu", "VisibleParams", visible.PARAMS),
        ("visible.cuh", "VisibleTable", visible.TABLE),
    ],
)
def test_structs_have_the_fields_of_the_source_in_its_order(
    source: str, struct: str, dtype: np.dtype
) -> None:
    names = dtype.names or ()
    assert fields(source, struct) == [(name, dtype[name] == np.uint64) for name in names]
    assert dtype.isalignedstruct


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_finder_compiles_without_spills(arch: str) -> None:
    resources = compile_spec(visible.SPEC, arch).resources
    assert resources.stack_bytes == 0, resources
    assert resources.spill_bytes == 0, resources
    assert resources.registers <= 65536 // visible.THREADS, resources
