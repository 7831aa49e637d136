"""SGLang's controller, host pool and injection of faults over `AttndHiCache`, on the CPU.

    ATTND_URL=http://127.0.0.1:8080 python -m pytest -p without_torchvision sglang_controller.py

The controller is SGLang's own, without the parts that need a device: its methods that query, read
and write storage run here in the test's thread.
"""

from __future__ import annotations

import os
import queue
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 300, 2, 2, 8


class HostPool:
    """Pages of K and V, first by page."""

    layout, page_size, layer_num, head_num, head_dim = "page_first", PAGE, LAYERS, HEADS, DIM
    dtype = torch.bfloat16
    size_per_token = 2 * LAYERS * HEADS * DIM * 2

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros((2, PAGES * PAGE, LAYERS, HEADS, DIM), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [half[at : at + PAGE] for at in indices.tolist()[::PAGE] for half in self.kv_buffer]
        return [one.data_ptr() for one in pages], [one.nbytes for one in pages]


def backend_of(pool: HostPool, model: str) -> Any:
    """As `attach_storage_backend` makes it from `--hicache-storage-backend dynamic`."""
    extra = {"backend_name": "attnd", "module_path": "attnd.sglang", "class_name": "AttndHiCache"}
    options = {"url": os.environ["ATTND_URL"], "revision": "one", "deadline_s": 10.0}
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        extra_config={**extra, "interface_v1": 1, "attnd": options},
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def controller_of(pool: HostPool, backend: Any) -> HiCacheController:
    controller = object.__new__(HiCacheController)
    controller.storage_backend = backend
    controller.page_size = PAGE
    controller.mem_pool_host = controller.storage_host_pool = pool
    controller.prefetch_sync_queue = queue.Queue()
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    return controller


@pytest.fixture
def model() -> str:
    return f"a model of its own {uuid.uuid4()}"


@pytest.fixture
def pool() -> HostPool:
    return HostPool()


@pytest.fixture
def controller(pool: HostPool, model: str) -> Iterator[HiCacheController]:
    backend = backend_of(pool, model)
    yield controller_of(pool, backend)
    backend.close()


def indices(first: int, num: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + num) * PAGE)


def tokens(num_pages: int) -> list[int]:
    return [*range(num_pages * PAGE)]


def query(controller: HiCacheController, num_pages: int) -> list[str]:
    operation = PrefetchOperation("request", tokens(num_pages), None, None)
    hashes, num_tokens = controller._storage_hit_query(operation)
    assert num_tokens == len(hashes) * PAGE
    return list(hashes)


def back_up(controller: HiCacheController, num_pages: int, first: int = 0) -> int:
    """Write pages as the controller's backup thread does; the tokens that were written."""
    operation = PrefetchOperation("request", tokens(num_pages), None, None)
    controller._storage_hit_query(operation)
    write = StorageOperation(
        indices(first, num_pages), tokens(num_pages), hash_value=operation.all_hash_values
    )
    controller._page_backup(write)
    return int(write.completed_tokens)


def read(controller: HiCacheController, hashes: list[str], first: int) -> int:
    """Read pages as the controller's prefetch thread does; the number of pages."""
    operation = PrefetchOperation("request", tokens(len(hashes)), None, None)
    operation.hash_value, operation.host_indices = hashes, indices(first, len(hashes))
    return int(controller._page_transfer(operation))


def test_pages_that_the_controller_writes_are_found_and_read(
    controller: HiCacheController, pool: HostPool
) -> None:
    pool.kv_buffer[:, : 140 * PAGE] = torch.randn((2, 140 * PAGE, LAYERS, HEADS, DIM))
    assert query(controller, 140) == []
    assert back_up(controller, 140) == 140 * PAGE
    hashes = query(controller, 145)
    assert len(hashes) == 140
    assert read(controller, hashes, 150) == 140
    assert torch.equal(pool.kv_buffer[:, : 140 * PAGE], pool.kv_buffer[:, 150 * PAGE : 290 * PAGE])


def test_injected_failures_are_shorter_hits_and_never_other_bytes(
    pool: HostPool, model: str
) -> None:
    backend = backend_of(pool, model)
    pool.kv_buffer[:, : 20 * PAGE] = torch.randn((2, 20 * PAGE, LAYERS, HEADS, DIM))
    assert back_up(controller_of(pool, backend), 20) == 20 * PAGE
    faulty = controller_of(pool, HiCacheStorageFailureInjector(backend, 0.001, 0.4))
    lengths = set()
    for _ in range(60):
        pool.kv_buffer[:, 100 * PAGE :] = 7
        hashes = query(faulty, 20)
        num = read(faulty, hashes, 100) if hashes else 0
        lengths.add((len(hashes), num))
        assert torch.equal(
            pool.kv_buffer[:, 100 * PAGE : (100 + num) * PAGE], pool.kv_buffer[:, : num * PAGE]
        )
        assert (pool.kv_buffer[:, (100 + num) * PAGE :] == 7).all()
    assert lengths == {(0, 0), (20, 0), (20, 20)}
    backend.close()


def test_a_hybrid_model_restores_what_its_pools_have_together(pool: HostPool, model: str) -> None:
    backend, states = backend_of(pool, model), HostPool()
    backend.register_mem_host_pool_v2(states, PoolName.SWA)
    controller = controller_of(pool, backend)
    assert back_up(controller, 8) == 8 * PAGE
    keys = query(controller, 8)
    states.kv_buffer[:] = torch.randn(states.kv_buffer.shape)
    stored = PoolTransfer(PoolName.SWA, indices(0, 4), keys=keys[2:6])
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * 4}
    window = PoolTransfer(PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = backend.batch_exists_v2(keys, [window])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [4, 5, 6])
    loaded = PoolTransfer(PoolName.SWA, indices(100, 4), keys=keys[2:6])
    assert backend.batch_get_v2([loaded]) == {PoolName.SWA: [True] * 4}
    assert torch.equal(
        states.kv_buffer[:, 100 * PAGE : 104 * PAGE], states.kv_buffer[:, : 4 * PAGE]
    )
    backend.close()


def test_another_models_pages_are_not_found(controller: HiCacheController) -> None:
    back_up(controller, 4)
    other = backend_of(HostPool(), "another model")
    assert query(controller_of(HostPool(), other), 4) == []
    assert len(query(controller, 4)) == 4
    other.close()


def test_the_factory_reports_a_configuration_that_is_refused(pool: HostPool) -> None:
    config = SimpleNamespace(
        extra_config={
            "backend_name": "attnd",
            "module_path": "attnd.sglang",
            "class_name": "AttndHiCache",
            "attnd": {"url": os.environ["ATTND_URL"]},
        },
        model_name="model",
        should_split_heads=False,
    )
    with pytest.raises(ValueError, match="revision"):
        StorageBackendFactory.create_backend("dynamic", config, pool)
