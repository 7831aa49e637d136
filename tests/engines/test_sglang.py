"""`AttndHiCache`: pages of SGLang's host pools, in place or by copies, by shard and pool."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import interfaces
from engines.records import OPTIONS, Records

PAGE, PAGES = 4, 10


class Pool:
    """K and V of `PAGES` pages in memory, given by pointers or by flat copies."""

    layout, page_size, layer_num, head_num, head_dim = "page_first", PAGE, 2, 1, 8
    dtype = torch.float16

    def __init__(self, *, in_place: bool = True) -> None:
        self.kv_buffer = torch.full((2, PAGES * PAGE, 2, 8), 255, dtype=torch.float16)
        self.in_place = in_place

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if not self.in_place:
            raise ValueError("Unsupported layout: layer_first")
        starts = indices.tolist()[::PAGE]
        pages = [half[at : at + PAGE] for at in starts for half in self.kv_buffer]
        return [one.data_ptr() for one in pages], [one.nbytes for one in pages]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index : index + PAGE].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * PAGE * 2 * 8, dtype=torch.float16)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[:, index : index + PAGE] = page.reshape(2, PAGE, 2, 8)


def config(**changed: Any) -> SimpleNamespace:
    ranks = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dcp_rank": 0, "dcp_size": 1}
    given = {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False, **ranks}
    given |= {
        "model_name": "model",
        "should_split_heads": False,
        "extra_config": {"attnd": OPTIONS},
    }
    return SimpleNamespace(**(given | changed))


@pytest.fixture
def module(engines: None, records: Records, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = import_module("attnd.sglang.hicache")
    monkeypatch.setattr(found, "version", lambda _: "0.5.23")
    return found


def attached(module: Any, pool: Pool, **changed: Any) -> Any:
    backend = module.AttndHiCache(config(**changed), {})
    backend.register_mem_pool_host(pool)
    return backend


def at(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "by copies"])
def test_pages_come_back_to_other_places_as_they_were(module: Any, in_place: bool) -> None:
    pool = Pool(in_place=in_place)
    backend = attached(module, pool)
    values = torch.randn((2, 3 * PAGE, 2, 8), dtype=torch.float16)
    pool.kv_buffer[:, at(7, 1, 4)] = values
    assert backend.batch_set_v1(["a", "b", "c"], at(7, 1, 4)) == [True] * 3
    pool.kv_buffer.fill_(255)
    assert backend.batch_exists(["a", "b", "z", "c"]) == 2 and backend.exists("c")
    assert backend.batch_get_v1(["b", "z", "c"], at(0, 2, 9)) == [True, False, True]
    assert torch.equal(pool.kv_buffer[:, at(0, 9)], values[:, PAGE:])
    assert (pool.kv_buffer[:, at(1, 2, 3, 4, 5, 6, 7, 8)] == 255).all()


def test_flat_tensors_for_a_controller_without_zero_copy(module: Any) -> None:
    backend = attached(module, Pool())
    pages = [torch.randn(128, dtype=torch.float16) for _ in range(2)]
    assert backend.batch_set(["a", "b"], pages) and backend.set("c", pages[0])
    places = [torch.zeros(128, dtype=torch.float16) for _ in range(3)]
    found = backend.batch_get(["a", "z", "b"], places)
    assert torch.equal(found[0], pages[0]) and found[1] is None and torch.equal(found[2], pages[1])
    assert not places[1].any()
    assert torch.equal(backend.get("c", places[1]), pages[0])


def test_a_service_that_is_away_is_a_miss(module: Any, records: Records) -> None:
    pool = Pool()
    backend = attached(module, pool)
    backend.batch_set_v1(["a"], at(0))
    records.hangs()
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_get_v1(["a"], at(1)) == backend.batch_set_v1(["b"], at(1)) == [False]
    assert backend.batch_exists_v2(["a"]).kv_hit_pages == 0


def test_a_page_that_is_there_is_not_sent_again(module: Any, records: Records) -> None:
    backend = attached(module, Pool())
    backend.batch_set_v1(["a"], at(0))
    records.calls.clear()
    assert backend.batch_set_v1(["a"], at(0)) == [True] and records.calls == ["contains"]


CHANGES = {
    "rank": {"tp_rank": 1},
    "ranks": {"tp_size": 1},
    "stage": {"pp_rank": 1, "pp_size": 2},
    "context": {"attn_cp_rank": 1},
    "model": {"model_name": "other"},
    "revision": {"extra_config": {"attnd": OPTIONS | {"revision": "two"}}},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_another_shard_or_model_is_a_miss(module: Any, changed: dict[str, Any]) -> None:
    attached(module, Pool()).batch_set_v1(["a"], at(0))
    assert attached(module, Pool()).exists("a")
    assert not attached(module, Pool(), **changed).exists("a")


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", torch.bfloat16), ("layout", "page_first_direct"), ("layer_num", 3), ("head_num", 2)],
)
def test_another_format_of_pages_is_a_miss(module: Any, name: str, value: object) -> None:
    attached(module, Pool()).batch_set_v1(["a"], at(0))
    other = Pool()
    setattr(other, name, value)
    assert not attached(module, other).exists("a")


def test_ranks_that_hold_the_same_latent_rows_share_them_but_no_states(module: Any) -> None:
    first = attached(module, Pool(), is_mla_model=True)
    second = attached(module, Pool(), is_mla_model=True, tp_rank=1)
    name = interfaces.PoolName.MAMBA
    for one in (first, second):
        one.register_mem_host_pool_v2(Pool(), name)
    transfer = interfaces.PoolTransfer(name, at(0), ["a"])
    assert first.batch_set_v2([transfer]) == {name: [True]}
    first.batch_set_v1(["a"], at(0))
    assert second.exists("a")
    assert second.batch_get_v2([transfer]) == {name: [False]}


def brute_force(
    kv: list[bool], pools: dict[Any, tuple[list[bool], Any, int]]
) -> tuple[int, list[int]]:
    """The lengths that every pool allows, by trying each."""
    lengths = []
    for length in range(1, len(kv) + 1):
        allowed = all(kv[:length])
        for there, policy, window in pools.values():
            begin = 0 if policy == interfaces.PoolHitPolicy.ALL_PAGES else max(0, length - window)
            allowed = allowed and all(there[begin:length])
        lengths += [length] if allowed else []
    return max(lengths, default=0), lengths


def test_hybrid_models_restore_the_prefixes_that_all_their_pools_have(module: Any) -> None:
    rng = np.random.default_rng(3)
    policies = interfaces.PoolHitPolicy
    names = {interfaces.PoolName.SWA: policies.ALL_PAGES}
    names |= {interfaces.PoolName.MAMBA: policies.TRAILING_PAGES}
    for number in range(60):
        backend = attached(module, Pool(), model_name=f"model {number}")
        keys = [f"{at}" for at in range(8)]
        kv = [bool(one) for one in rng.random(8) < 0.9]
        pools, transfers = {}, []
        for name, policy in names.items():
            backend.register_mem_host_pool_v2(Pool(), name)
            there = [bool(one) for one in rng.random(8) < 0.7]
            window = int(rng.integers(1, 3))
            pools[name] = (there, policy, window)
            stored = [key for key, one in zip(keys, there, strict=True) if one]
            if stored:
                backend.batch_set_v2(
                    [interfaces.PoolTransfer(name, at(*range(len(stored))), stored)]
                )
            transfers.append(interfaces.PoolTransfer(name, None, keys[:window], policy))
        for page, (key, one) in enumerate(zip(keys, kv, strict=True)):
            if one:
                backend.batch_set_v1([key], at(page))
        result = backend.batch_exists_v2(keys, transfers)
        found = (result.kv_hit_pages, result.restorable_prefix_pages)
        assert found == brute_force(kv, pools), (kv, pools)


def test_a_hit_policy_that_is_unknown_is_refused(module: Any) -> None:
    backend = attached(module, Pool())
    backend.batch_set_v1(["a"], at(0))
    name, policy = interfaces.PoolName.SWA, interfaces.PoolHitPolicy.BLOCK_GROUPS
    backend.register_mem_host_pool_v2(Pool(), name)
    with pytest.raises(ValueError, match="not one that attnd knows"):
        backend.batch_exists_v2(["a"], [interfaces.PoolTransfer(name, hit_policy=policy)])


def test_transfers_without_indices_or_with_others_move_nothing(module: Any) -> None:
    backend = attached(module, Pool())
    name = interfaces.PoolName.KV
    assert backend.batch_get_v2([interfaces.PoolTransfer(name, None, ["a"])]) == {name: [False]}
    with pytest.raises(ValueError, match="8 indices for 1 pages of 4 tokens"):
        backend.batch_get_v1(["a"], at(0, 1))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no revision": (
        {"extra_config": {"attnd": {"url": "http://127.0.0.1:1"}}},
        "revision ''",
    ),
    "no model": ({"model_name": None}, "the model is None"),
    "no options": ({"extra_config": None}, "url is missing"),
    "split heads": ({"should_split_heads": True}, "omit tp_lcm_size"),
}


@pytest.mark.parametrize(("changed", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_a_configuration_that_does_not_say_what_pages_are_is_refused(
    module: Any, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        module.AttndHiCache(config(**changed), {})


def test_pools_without_bytes_pages_or_formats_are_refused(module: Any) -> None:
    backend = module.AttndHiCache(config(), {})
    logical, closed, nameless = Pool(), Pool(in_place=False), Pool()
    logical.kv_buffer = None  # type: ignore[assignment]
    closed.get_dummy_flat_data_page = None  # type: ignore[method-assign, assignment]
    nameless.layout = None  # type: ignore[assignment]
    for pool, reason in (
        (logical, "holds no bytes itself"),
        (closed, "neither its pages' memory nor"),
        (nameless, "does not say its dtype"),
    ):
        with pytest.raises(ValueError, match=reason):
            backend.register_mem_pool_host(pool)


def test_a_clear_erases_all(module: Any, records: Records) -> None:
    backend = attached(module, Pool())
    backend.batch_set_v1(["a"], at(0))
    backend.clear()
    assert not backend.exists("a") and not records.held
    backend.close()
    assert records.is_closed
