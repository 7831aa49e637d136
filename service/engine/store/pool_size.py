"""The size of the pool, and the backend that holds it: from settings to a `Backend`."""

from __future__ import annotations

from collections.abc import Callable

from config.settings import DEFAULT_NUM_PAGES, MAX_SLOTS, BackendSettings, PoolSettings
from kernels import cuda_devices, make_backend
from kernels.backend import Backend, Numerics, PoolGeometry
from kernels.memory import Kind, free_bytes


class PoolTooSmall(RuntimeError):
    """The share of memory asked for does not hold one page."""


def backend_maker(
    pool: PoolSettings, backend: BackendSettings, worker: int = 0, numerics: Numerics = "fast"
) -> Callable[[], Backend]:
    """Makes the backend when called, with memory measured then; engine `worker` of several has a
    GPU of its own."""

    def make() -> Backend:
        kind: Kind = "cuda" if cuda_devices() else "cpu"
        kind = backend.kind if backend.kind != "auto" else kind
        device = backend.device if kind == "cpu" else backend.device + worker
        pages = num_pages(pool, lambda: free_bytes(kind, device))
        return make_backend(kind, geometry(pool, pages), device, numerics=numerics)

    return make


def num_pages(pool: PoolSettings, free: Callable[[], int]) -> int:
    """Pages by `pool.num_pages`, or the number that fits the share of the `free()` bytes.

    Raises `PoolTooSmall`, with the numbers, when that is none.
    """
    if pool.num_pages is not None:
        return pool.num_pages
    if pool.memory_fraction is None:
        return DEFAULT_NUM_PAGES
    page_bytes = geometry(pool, pages=1).page_bytes * pool.num_layers
    given = int(free() * pool.memory_fraction)
    pages = min(given // page_bytes, MAX_SLOTS // pool.page_size)
    if pages < 1:
        raise PoolTooSmall(
            f"pool.memory_fraction = {pool.memory_fraction} is {given} bytes here, and one page "
            f"over {pool.num_layers} layers has {page_bytes}: raise it, or make pages smaller"
        )
    return pages


def geometry(pool: PoolSettings, pages: int) -> PoolGeometry:
    return PoolGeometry(
        num_layers=pool.num_layers,
        num_pages=pages,
        page_size=pool.page_size,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        layout=pool.layout,
        dtype=pool.dtype,
        k_scale=pool.k_scale,
        v_scale=pool.v_scale,
    )
