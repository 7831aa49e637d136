"""The parts of vLLM's, LMCache's and SGLang's interfaces that the adapters use."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

ENGINES = ("lmcache", "vllm", "sglang")
ADAPTERS = ("attnd.lmcache", "attnd.vllm", "attnd.sglang")


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, at: int) -> None:
        self.bits[at] = True

    def test(self, at: int) -> bool:
        return self.bits[at]


class L2StoreResult(int):
    def __new__(cls, success: bool, transferred: int) -> L2StoreResult:
        return super().__new__(cls, transferred if success else -1)


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert not self.stored.keys() & {*keys}
        self.stored |= dict(zip(keys, sizes, strict=True))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        assert [self.stored.pop(key) for key in keys] == sizes


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    RETRY = auto()


class RequestOffloadingContext:
    pass


@dataclass
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...]


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], int] = {}

    def increase_counter(self, name: str, count: int, labels: tuple[str, ...]) -> None:
        self.counts[labels] = count


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.tier_type = tier_type
        self.block_size_bytes = view.strides[0]


class AsyncLookupManager:
    """As vLLM's, but its background is the test: `flush` answers at once."""

    def __init__(self, tier_type: str) -> None:
        self.verdicts: dict[bytes, bool] = {}
        self.asked: list[tuple[bytes, Any]] = []

    def lookup(self, key: bytes, context: Any) -> bool | None:
        if key not in self.verdicts:
            self.asked.append((key, context))
        return self.verdicts.get(key)

    def flush(self) -> None:
        keys = [key for key, _ in self.asked]
        self.verdicts |= dict(zip(keys, self.batch_lookup(keys, None), strict=True))
        self.asked.clear()

    def batch_lookup(self, keys: list[bytes], context: Any) -> Iterator[bool]:
        raise NotImplementedError

    def mark_miss(self, keys: list[bytes]) -> None:
        self.verdicts |= dict.fromkeys(keys, False)

    def cleanup(self, req_id: str) -> None:
        self.verdicts.clear()

    def shutdown(self) -> None:
        pass


class HiCacheStorage:
    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool: Any, name: Any) -> None:
        pass


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] = field(default_factory=list)


MODULES: dict[str, tuple[type, ...]] = {
    "lmcache.lmcache_native": (Bitmap,),
    "lmcache.v1.distributed.internal_api": (L2StoreResult,),
    "lmcache.v1.distributed.l2_adapters.base": (L2AdapterInterface,),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": (OffloadingConnectorStats,),
    "vllm.v1.kv_offload.base": (
        *(LookupResult, Medium, OffloadingCounterMetadata, RequestOffloadingContext),
    ),
    "vllm.v1.kv_offload.tiering.async_lookup": (AsyncLookupManager,),
    "vllm.v1.kv_offload.tiering.base": (JobResult, SecondaryTierManager),
    "sglang.srt.mem_cache.hicache_storage": (
        *(HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult),
    ),
}


def modules() -> dict[str, types.ModuleType]:
    """The modules and their parents, by name."""
    made: dict[str, types.ModuleType] = {}
    for name, members in MODULES.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            made.setdefault(parent, types.ModuleType(parent))
        for member in members:
            setattr(made[name], member.__name__, member)
    return made
