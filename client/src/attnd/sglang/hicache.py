"""`AttndHiCache`: pages of SGLang's host pools as records of attnd."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from attnd.engines.options import StoreOptions, stamp_of
from attnd.engines.store import EngineStore
from attnd.sglang.pages import HostPool, host_pool, memory_of

STORED: Final = ("stored", "present")
RANKS: Final = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")


class AttndHiCache(HiCacheStorage):
    """Pages in attnd, in calls that block at most for a deadline; a failure is a miss.

    Options are those of `StoreOptions`, in "attnd" of the extra config; `revision` must be given.
    SGLang's keys cover the tokens, the namespace and the LoRA of a page. The key of a record adds
    the pool, its dtype, layout and shapes, and the ranks whose shard it is; the stamp the model,
    its revision and SGLang's release. Raises ValueError where these do not say what the bytes are.
    """

    def __init__(self, storage_config: Any, _: object = None) -> None:
        options = StoreOptions.read((storage_config.extra_config or {}).get("attnd") or {})
        model = storage_config.model_name
        if not options.revision or not model:
            raise ValueError(
                f"the model is {model!r} and its revision {options.revision!r}: SGLang's keys do "
                'not say which weights made a page; give "revision" in "attnd" of the extra '
                "config, such as the commit of the model's repository"
            )
        if storage_config.should_split_heads:
            raise ValueError("pages are split by heads, which attnd does not do: omit tp_lcm_size")
        facts = {"revision": options.revision, "sglang": version("sglang")}
        self._config = storage_config
        self._store = EngineStore(options, stamp_of("sglang", model, facts))
        self._store.check()
        self._pools: dict[str, HostPool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, host_pool_name)

    def _register(self, pool: Any, name: Any) -> None:
        config = self._config
        ranks: dict[str, object] = {rank: getattr(config, rank) for rank in RANKS}
        is_replicated = config.is_mla_model and name != PoolName.MAMBA
        if not is_replicated:
            ranks |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        found = host_pool(pool, ranks, str(name))
        self._store.check(found.page_bytes)
        self._pools[str(name)] = found

    def _keys(self, name: Any, keys: Sequence[str]) -> list[bytes]:
        tag = self._pools[str(name)].tag
        return [hashlib.blake2b(tag + key.encode(), digest_size=32).digest() for key in keys]

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """The number of pages that are there, from the first one on."""
        return leading(self._store.contains(self._keys(PoolName.KV, keys)))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The prefixes that can be restored: their KV pages, and what each further pool needs."""
        num_kv = self.batch_exists(keys)
        hits = {PoolName.KV: num_kv} if num_kv else {}
        lengths = [*range(1, num_kv + 1)]
        for transfer in pool_transfers or ():
            there = self._store.contains(self._keys(transfer.name, keys[:num_kv]))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = {*range(1, leading(there) + 1)}
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                possible = {
                    length
                    for length in range(1, num_kv + 1)
                    if all(there[max(0, length - window) : length])
                }
            else:
                raise ValueError(
                    f"the hit policy {transfer.hit_policy} is not one that attnd knows"
                )
            if possible:
                hits[transfer.name] = max(possible)
            lengths = [one for one in lengths if one in possible]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._get)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._set)

    def _each(self, transfers: Any, act: Callable[..., list[bool]]) -> dict[str, list[bool]]:
        return {one.name: act(one.name, one.keys or [], one.host_indices) for one in transfers}

    def _get(self, name: Any, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools[str(name)]
        if indices is None:
            return [False] * len(keys)
        if pool.in_place:
            return self._store.get(self._keys(name, keys), pool.pages(indices, len(keys)))
        pages = [np.empty(pool.page_bytes, np.uint8) for _ in keys]
        hits = self._store.get(self._keys(name, keys), [[page] for page in pages])
        size = max(1, pool.pool.page_size)
        for at, (page, hit) in enumerate(zip(pages, hits, strict=True)):
            if hit:
                pool.write(int(indices[at * size]), page)
        return hits

    def _set(self, name: Any, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        if indices is None:
            return [False] * len(keys)
        names = self._keys(name, keys)
        done = self._store.contains(names)
        pages = self._pools[str(name)].pages(indices, len(keys))
        new = [at for at, found in enumerate(done) if not found]
        outcomes = self._store.put([names[at] for at in new], [pages[at] for at in new])
        for at, outcome in zip(new, outcomes, strict=True):
            done[at] = outcome in STORED
        return done

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Pages as flat tensors, for a controller without `interface_v1`."""
        places = [memory_of(one) for one in target_locations]
        hits = self._store.get(self._keys(PoolName.KV, keys), [[place] for place in places])
        return [one if hit else None for one, hit in zip(target_locations, hits, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        pages = [[memory_of(one.contiguous())] for one in values]
        return all(one in STORED for one in self._store.put(self._keys(PoolName.KV, keys), pages))

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def clear(self) -> None:
        """Erase all records of the key's namespace, those of other engines too."""
        self._store.clear()

    def close(self) -> None:
        """End the connection."""
        self._store.close()


def leading(hits: Sequence[bool]) -> int:
    """How many are True from the first one on."""
    return hits.index(False) if False in hits else len(hits)
