"""From settings to the engine's backend, with the size of its pool, and to its description."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from attnd.wire.bounds import MAX_JSON_BYTES
from attnd.wire.dtypes import DTYPE_NAMES

from config.groups import GroupSettings
from config.settings import DEFAULT_NUM_PAGES, MAX_SLOTS, BackendSettings, PoolSettings, Settings
from kernels import cuda_devices, driver_problem, make_backend
from kernels.backend import (
    NUMPY_DTYPES,
    TENSOR_DTYPES,
    Backend,
    LayerGroup,
    Numerics,
    PoolGeometry,
    Unsupported,
)
from kernels.geometry import with_least_waste
from kernels.memory import Kind, free_bytes
from service import __version__
from service.operations.schema.fields import GroupAnswer, InfoAnswer, LimitsAnswer

LOG: Final = logging.getLogger("attnd.engine")
SHAPE: Final = (
    *("num_layers", "page_size", "num_kv_heads", "head_dim"),
    *("layout", "dtype", "k_scale", "v_scale"),
)
"""Fields of a pool's geometry that are settings by the same names."""


class PoolTooSmall(RuntimeError):
    """The share of memory asked for does not hold one page."""


@contextmanager
def opened(settings: Settings, worker: int = 0) -> Iterator[tuple[Settings, Backend]]:
    """The settings of engine `worker`, and its backend, which is closed at the end."""
    own = settings.with_own_disk_path(f"engine-{worker}")
    backend = open_backend(own.pool, own.backend, worker, own.engine.numerics)
    try:
        yield own, backend
    finally:
        backend.close()


def open_backend(
    pool: PoolSettings, backend: BackendSettings, worker: int = 0, numerics: Numerics = "fast"
) -> Backend:
    """The backend with its pool; engine `worker` of several has a GPU of its own."""
    if backend.kind == "none":
        return make_backend("none", geometry(pool, 1))
    found: Kind = "cuda" if backend.kind == "auto" and cuda_devices() else "cpu"
    kind = found if backend.kind == "auto" else backend.kind
    if (backend.kind, kind) == ("auto", "cpu") and (problem := driver_problem()):
        LOG.warning("backend.kind = auto uses the CPU: %s", problem)
    if any(group.kind == "latent" for group in pool.groups):
        rule = "no operation takes rows of latent KV yet: the kernels alone do"
        raise Unsupported("pool.groups", "kind latent", rule)
    device = backend.device if kind == "cpu" else backend.device + worker
    pages = num_pages(pool, lambda: free_bytes(kind, device))
    return make_backend(kind, geometry(pool, pages), device, numerics=numerics)


def num_pages(pool: PoolSettings, free: Callable[[], int]) -> int:
    """Pages by `pool.num_pages`, or the number that fits the share of the `free()` bytes.

    Raises `PoolTooSmall`, with the numbers, when that is none.
    """
    if pool.num_pages is not None:
        return pool.num_pages
    if pool.memory_fraction is None:
        return DEFAULT_NUM_PAGES
    one = geometry(pool, pages=1)
    given = int(free() * pool.memory_fraction)
    pages = min(given // one.payload_bytes, MAX_SLOTS // pool.page_size)
    if pages < 1:
        raise PoolTooSmall(
            f"pool.memory_fraction = {pool.memory_fraction} is {given} bytes here, and one page "
            f"over {one.num_layers} layers has {one.payload_bytes}: raise it, or make pages smaller"
        )
    return pages


def geometry(pool: PoolSettings, pages: int) -> PoolGeometry:
    """The pool's shape, with tokens per page for groups that have none of their own."""
    if not pool.groups:
        return PoolGeometry(num_pages=pages, **pool.model_dump(include=set(SHAPE)))
    groups = with_least_waste(tuple(layer_group(one, pool) for one in pool.groups))
    return PoolGeometry.of_groups(groups, pages, pool.layout, (pool.k_scale, pool.v_scale))


def layer_group(group: GroupSettings, pool: PoolSettings) -> LayerGroup:
    """A group by its settings, with the pool's page size."""
    dtype = group.dtype or pool.dtype
    layers, rest = tuple(sorted(group.layers)), (pool.page_size, dtype, group.window, group.kind)
    if group.kind == "latent":
        values = group.latent_dim or 0
        return LayerGroup(layers, 1, values + (group.rope_dim or 0), values, *rest)
    heads, head_dim = group.num_kv_heads or 0, group.head_dim or 0
    return LayerGroup(layers, heads, head_dim, group.v_head_dim or head_dim, *rest)


def make_info(backend: Backend, settings: Settings) -> InfoAnswer:
    """The service's description of itself; the checks of requests rest on it."""
    server = settings.server
    limits = LimitsAnswer(
        max_body_bytes=server.max_body_bytes,
        max_json_body_bytes=min(server.max_body_bytes, MAX_JSON_BYTES),
        max_answer_bytes=server.max_answer_bytes,
        max_sequences=settings.engine.max_sequences,
        queue_depth=server.queue_depth,
        deadline_s=server.deadline_s,
    )
    return InfoAnswer(
        version=__version__,
        instance_id=uuid.uuid4().hex,
        backend=backend.name,
        device=backend.device,
        tensor_dtypes=[DTYPE_NAMES[NUMPY_DTYPES[name]] for name in TENSOR_DTYPES],
        unsupported=list(backend.unsupported),
        numerics="invariant" if backend.split_keys else "fast",
        limits=limits,
        groups=group_answers(backend.geometry),
        **{name: getattr(backend.geometry, name) for name in (*SHAPE, "num_pages")},
    )


def group_answers(geometry: PoolGeometry) -> list[GroupAnswer] | None:
    """The groups of a pool that was made with any."""
    if not geometry.layer_groups:
        return None
    return [
        GroupAnswer(
            **asdict(group) | {"layers": list(group.layers)},
            page_bytes=group.page_bytes,
            padding=1.0 - group.page_bytes / geometry.payload_bytes,
        )
        for group in geometry.groups
    ]
