"""How settings become a pool: pages as reply, or a share of the memory that is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.settings import MAX_SLOTS, BackendSettings, PoolSettings
from kernels.memory import free_bytes, host_free_bytes
from service.engine.store.setup import PoolTooSmall, geometry, num_pages, open_backend

PAGE_BYTES = 4 * 16 * 2 * 8 * 128 * 2  # layers, tokens, K and V, heads, head_dim, fp16


def never() -> int:
    raise AssertionError("free memory need not be measured")


def test_a_number_of_pages_needs_no_look_at_the_memory() -> None:
    assert num_pages(PoolSettings(num_pages=7), never) == 7
    assert num_pages(PoolSettings(), never) == 512


def test_a_fraction_is_of_free_memory_over_all_layers() -> None:
    assert num_pages(PoolSettings(memory_fraction=0.5), lambda: 20 * PAGE_BYTES + 1) == 10


def test_a_fraction_stops_where_token_slots_would_pass_int32() -> None:
    assert num_pages(PoolSettings(memory_fraction=0.9), lambda: 2**60) == MAX_SLOTS // 16


def test_a_share_below_one_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(PoolTooSmall, match=rf"{PAGE_BYTES - 1} bytes.*{PAGE_BYTES}"):
        num_pages(PoolSettings(memory_fraction=0.5), lambda: 2 * PAGE_BYTES - 2)


def test_the_backend_has_the_geometry_of_the_settings() -> None:
    pool = PoolSettings(num_pages=3, layout="HND", dtype="fp8_e5m2", k_scale=2.0, num_layers=1)
    backend = open_backend(pool, BackendSettings(kind="cpu"))
    assert backend.name == "cpu"
    assert backend.geometry == geometry(pool, 3)
    assert (backend.geometry.k_scale, backend.geometry.layout) == (2.0, "HND")
    backend.close()


def test_the_cpu_backend_looks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.store.setup.cuda_devices", never)
    pool = PoolSettings(num_pages=1, num_layers=1)
    open_backend(pool, BackendSettings(kind="cpu")).close()


def test_a_fraction_of_this_machine_is_some_pages() -> None:
    small = PoolSettings(memory_fraction=1e-4, num_layers=1, page_size=1, head_dim=1)
    assert num_pages(small, lambda: free_bytes("cpu")) > 0


def test_free_memory_is_the_lesser_of_available_and_the_container_s_rest(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   40 kB\n")
    assert host_free_bytes(meminfo, tmp_path) == 40 * 1024
    (tmp_path / "memory.current").write_text("300\n")
    for limit, left in (("max", 40 * 1024), ("1000", 700), ("200", 0), (str(2**60), 40 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert host_free_bytes(meminfo, tmp_path) == left, limit


def test_a_system_without_memory_figures_needs_num_pages(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(meminfo, tmp_path)
    meminfo.write_text("MemTotal:  100 kB\n")
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(meminfo, tmp_path)
