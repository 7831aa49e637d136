"""Pages of SGLang's host pools as pieces of memory, and what their bytes depend on."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

FACTS: Final = (
    *("dtype", "layout", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer", "storage_format_tag"),
)
"""Attributes of a host pool that say what its pages look like, where it has them."""
FAILURES: Final = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a host pool raises for a way to its pages that it does not have."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """A host pool of SGLang, the sizes of a page's pieces, and a tag of all that its bytes are.

    `in_place`: pages are read and written where they lie; otherwise by flat copies of SGLang's.
    """

    pool: Any
    tag: bytes
    page_bytes: int
    in_place: bool

    def pages(self, indices: torch.Tensor, num_pages: int) -> list[list[NDArray[np.uint8]]]:
        """The pieces of each page at token `indices`, flat copies where it is not `in_place`.

        Raises ValueError where there are not exactly the indices of `num_pages` pages.
        """
        size = max(1, self.pool.page_size)
        if len(indices) != num_pages * size:
            raise ValueError(f"{len(indices)} indices for {num_pages} pages of {size} tokens")
        if not num_pages:
            return []
        if not self.in_place:
            starts = indices[::size].tolist()
            return [[memory_of(self.pool.get_data_page(at, flat=True))] for at in starts]
        pieces = pieces_of(self.pool, indices)
        each = len(pieces) // num_pages
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]

    def write(self, index: int, page: NDArray[np.uint8]) -> None:
        """Write a flat copy of a page."""
        flat = torch.from_numpy(page).view(self.pool.get_dummy_flat_data_page().dtype)
        self.pool.set_from_flat_data_page(index, flat)


def host_pool(pool: Any, ranks: dict[str, object], name: str) -> HostPool:
    """Look at a host pool; raises ValueError where it has no pages that can be stored.

    `ranks`: the shard of the model that its pages hold.
    """
    if getattr(pool, "kv_buffer", pool) is None:
        raise ValueError(f"the host pool {name} holds no bytes itself: attnd cannot store it")
    try:
        one = pieces_of(pool, torch.zeros(max(1, pool.page_size), dtype=torch.int64))
        sizes, in_place = [*map(len, one)], True
    except FAILURES:
        try:
            sizes, in_place = [len(memory_of(pool.get_dummy_flat_data_page()))], False
        except FAILURES as error:
            raise ValueError(
                f"the host pool {name} ({type(pool).__name__}) gives neither its pages' memory nor "
                f"flat copies: {error}; use --hicache-mem-layout page_first"
            ) from error
    facts: dict[str, object] = {
        one: str(getattr(pool, one)) for one in FACTS if getattr(pool, one, None) is not None
    }
    if not {"dtype", "layout", "page_size"} <= facts.keys():
        raise ValueError(
            f"the host pool {name} ({type(pool).__name__}) does not say its dtype, layout and page "
            "size: use a release of SGLang that docs/engines.md names"
        )
    facts |= {"pool": name, "kind": type(pool).__name__, "sizes": sizes, "in_place": in_place}
    text = json.dumps(facts | ranks, sort_keys=True).encode()
    return HostPool(pool, hashlib.blake2b(text, digest_size=32).digest(), sum(sizes), in_place)


def pieces_of(pool: Any, indices: torch.Tensor) -> list[NDArray[np.uint8]]:
    """Views of the host pool's own memory, a page's pieces one after another."""
    pointers, sizes = pool.get_page_buffer_meta(indices)
    pairs = zip(flat(pointers), flat(sizes), strict=True)
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        for pointer, size in pairs
    ]


def flat(given: Sequence[Any]) -> list[int]:
    """Pointers or sizes, of which SGLang groups some in lists."""
    return [
        int(one) for some in given for one in (some if isinstance(some, (list, tuple)) else [some])
    ]


def memory_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor on the CPU; raises ValueError for another."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a tensor on {tensor.device}, expected a contiguous one on the CPU")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
