"""A plugin of pytest: vLLM's own tests of tiering get attnd's tier in place of its example tier.

    ATTND_URL=http://127.0.0.1:8080 python -m pytest -p vllm_example_tier test_tiering_offloading.py

The example tier works at once, in the caller's thread. So does this one: it waits for its threads
after each call. Beyond the interface, the tests use two attributes of the example tier: `chunks`,
to which they add keys, and `completed_jobs`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
from attnd.engines.options import StoreOptions
from attnd.vllm.tier import AttndTier
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.example import manager

URL = os.environ["ATTND_URL"]


class Chunks:
    """Keys that the tests put into the tier without the host cache."""

    def __init__(self, tier: ExampleSecondaryTierManager) -> None:
        self.tier = tier

    def __setitem__(self, key: bytes, value: bool) -> None:
        block = np.zeros(self.tier.block_size_bytes, np.uint8)
        assert self.tier._store.put([key], [[block]]) in (["stored"], ["present"])
        self.tier.stored.add(key)


class ExampleSecondaryTierManager(AttndTier):
    """attnd's tier with the example tier's name, parameters and medium."""

    medium = Medium.CPU

    def __init__(self, *args: Any, custom_param: int = 0, **options: Any) -> None:
        self.stored: set[bytes] = set()
        self.completed_jobs: list[Any] = []
        super().__init__(*args, url=URL, deadline_s=10.0, **options)
        self.chunks = Chunks(self)

    def _stamp(self, spec: Any, options: StoreOptions) -> str:
        return f"a tier of its own {uuid.uuid4()}"

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        ends = time.monotonic() + 10
        while (found := super().lookup(key, req_context)) is LookupResult.RETRY:
            assert time.monotonic() < ends, "a lookup took 10 s"
            self._lookups.flush()
            time.sleep(0.001)
        self._lookups.cleanup(req_context.req_id)
        return found

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        self.stored |= {*job_metadata.keys}
        self._collect()

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        self._collect()

    def _collect(self) -> None:
        self._workers.drain()
        self.completed_jobs += super().get_finished_jobs()

    def get_finished_jobs(self) -> Iterator[Any]:
        jobs, self.completed_jobs[:] = [*self.completed_jobs], []
        return iter(jobs)

    def get_num_chunks(self) -> int:
        return sum(self._store.contains([*self.stored]))


manager.ExampleSecondaryTierManager = ExampleSecondaryTierManager  # type: ignore[misc]
