"""vLLM's tiers on the CPU: `CpuTieringSpec`, whose block copies are plain copies of memory.

vLLM's own spec asks for a GPU, since its copies run on a device's streams. Everything else is
vLLM's, unchanged. This runs inside vLLM, in an environment of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuCopies(OffloadingWorker):
    """Copies blocks between vLLM's cache and its host cache at once, in the caller's thread."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self.region = region
        self.blocks = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self.chunks = [region.create_next_worker_view(one.shape[1]) for one in self.blocks]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, self.blocks, src_spec.block_ids, self.chunks, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, self.chunks, src_spec.block_ids, self.blocks, dst_spec.block_ids)

    def copy(self, job: int, sources: Any, read: Any, targets: Any, written: Any) -> bool:
        for source, target in zip(sources, targets, strict=True):
            target[torch.from_numpy(written).long()] = source[torch.from_numpy(read).long()]
        self.done.append(TransferResult(job, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """No copy outlasts its call."""

    def shutdown(self) -> None:
        self.blocks.clear()
        self.chunks.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec without its check that the device is a GPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, region)
        return self._worker
