"""Stamps, keys and digests: a change of any field shows, and no field is forgotten."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import pytest

from kernels.geometry import LayerGroup, PoolGeometry
from service.core.keys import Prefix, extra_by_page, root_key
from service.engine.handlers.exports import Header, PartDigest, header_digest
from service.engine.tiers.page_records import layout_of, next_id

POOL: Final = PoolGeometry(2, 8, 4, 2, 64, "NHD", "fp8_e4m3", 0.5, 0.25)
OTHER_POOLS: Final[dict[str, Any]] = {
    "num_layers": 3,
    "page_size": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "layout": "HND",
    "dtype": "fp8_e5m2",
    "k_scale": 0.75,
    "v_scale": 0.75,
    "layer_groups": (
        LayerGroup((0,), 2, 64, 64, 4, "fp8_e4m3"),
        LayerGroup((1,), 2, 64, 64, 4, "fp8_e4m3", 128),
    ),
}
HEADER: Final = Header(
    generation="0" * 32,
    num_layers=2,
    page_size=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="fp16",
    layout="NHD",
    k_scale=1.0,
    v_scale=1.0,
    lengths=[8, 8],
    ttl_s=60.0,
    num_named=2,
    cache_salt="",
    extra=None,
    part_bytes=4096,
    num_parts=1,
)
OTHER_HEADERS: Final[dict[str, Any]] = {
    "version": 2,
    "generation": "1" + "0" * 31,
    "num_layers": 1,
    "page_size": 8,
    "num_kv_heads": 1,
    "head_dim": 128,
    "dtype": "bf16",
    "layout": "HND",
    "k_scale": 0.5,
    "v_scale": 0.5,
    "lengths": [8, 7],
    "ttl_s": None,
    "num_named": 1,
    "cache_salt": "x",
    "extra": [],
    "part_bytes": 4095,
    "num_parts": 2,
}
NAMES: Final = {"token_ids": np.arange(8, dtype=np.uint32)}
PAGE: Final = 4


def test_every_field_of_a_pool_and_of_a_header_is_here() -> None:
    given = {one.name for one in fields(PoolGeometry) if one.init}
    assert OTHER_POOLS.keys() == given - {"num_pages"}
    assert OTHER_HEADERS.keys() == Header.model_fields.keys()


@pytest.mark.parametrize("name", OTHER_POOLS)
def test_records_of_another_pool_have_another_stamp(name: str) -> None:
    other = replace(POOL, **{name: OTHER_POOLS[name]})
    assert layout_of(other, "m").stamp != layout_of(POOL, "m").stamp


def test_records_of_another_model_have_another_stamp_and_the_number_of_pages_counts_not() -> None:
    stamp = layout_of(POOL, "m").stamp
    assert layout_of(POOL, "n").stamp != stamp == layout_of(replace(POOL, num_pages=9), "m").stamp


@pytest.mark.parametrize("name", OTHER_HEADERS)
def test_another_header_has_another_digest(name: str) -> None:
    other = HEADER.model_copy(update={name: OTHER_HEADERS[name]})
    assert header_digest(other, NAMES) != header_digest(HEADER, NAMES)


def test_other_names_and_parts_have_other_digests() -> None:
    tokens = NAMES["token_ids"]
    names = [{"token_ids": tokens}, {"token_ids": tokens[::-1]}, {"token_ids": tokens[:4]}, {}]
    digests = {header_digest(HEADER, one) for one in names}
    assert len(digests) == 4
    one, other = np.zeros((2, 4), np.float16), np.ones((2, 4), np.float16)
    found = set()
    for before, number, k, v in (
        (b"0", 0, one, other),
        (b"1", 0, one, other),
        (b"0", 1, one, other),
        (b"0", 0, other, one),
        (b"0", 0, one, one),
        (b"0", 0, other, other),
    ):
        digest = PartDigest(before, number)
        digest.update(k, v)
        found.add(digest.digest())
    assert len(found) == 6


def test_a_key_covers_namespace_salt_all_tokens_before_and_further_keys() -> None:
    tokens = np.arange(2 * PAGE, dtype=np.uint32)
    changed = [np.where(np.arange(2 * PAGE) == at, 99, tokens) for at in range(2 * PAGE)]
    given: list[tuple[str, str, Any, list[tuple[int, bytes]]]] = [
        *(("a", "", one.astype(np.uint32), []) for one in (tokens, *changed)),
        ("b", "", tokens, []),
        ("a", "x", tokens, []),
        ("a", "", tokens, [(1, b"k")]),
        ("a", "", tokens, [(2, b"k")]),
        ("a", "", tokens, [(1, b"l")]),
        ("a", "", tokens, [(1, b"kk")]),
        ("a", "", tokens, [(1, b"k"), (2, b"k")]),
        ("a", "", tokens, [(PAGE + 1, b"k")]),
    ]
    last = []
    for namespace, salt, ids, extra in given:
        named = Prefix(ids, extra=extra_by_page(extra, PAGE)) if extra else Prefix(ids)
        *_, key = named.chain(root_key(namespace, salt), PAGE)
        last.append(key)
    assert len(set(last)) == len(given)
    assert len({next_id(before, key) for before in last[:2] for key in last[:2]}) == 4
