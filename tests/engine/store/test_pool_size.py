"""How settings become a pool: pages as told, or a share of the memory that is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.settings import MAX_SLOTS, BackendSettings, PoolSettings
from kernels.memory import free_bytes, host_free_bytes
from service.engine.store.pool_size import PoolTooSmall, backend_maker, geometry, num_pages

PAGE_BYTES = 4 * 16 * 2 * 8 * 128 * 2  # layers, tokens, K and V, heads, head_dim, fp16


def never() -> int:
    raise AssertionError("nobody needs to know how much memory is free")


def test_pages_as_told_need_no_look_at_the_memory() -> None:
    assert num_pages(PoolSettings(num_pages=7), never) == 7
    assert num_pages(PoolSettings(), never) == 512


def test_a_fraction_is_of_what_is_free_over_all_layers() -> None:
    assert num_pages(PoolSettings(memory_fraction=0.5), lambda: 20 * PAGE_BYTES + 1) == 10


def test_a_fraction_stops_where_token_slots_would_pass_int32() -> None:
    assert num_pages(PoolSettings(memory_fraction=0.9), lambda: 2**60) == MAX_SLOTS // 16


def test_a_share_below_one_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(PoolTooSmall, match=rf"{PAGE_BYTES - 1} bytes.*{PAGE_BYTES}"):
        num_pages(PoolSettings(memory_fraction=0.5), lambda: 2 * PAGE_BYTES - 2)


def test_the_backend_has_the_geometry_of_the_settings() -> None:
    pool = PoolSettings(num_pages=3, layout="HND", dtype="fp8_e5m2", k_scale=2.0, num_layers=1)
    backend = backend_maker(pool, BackendSettings(kind="cpu"))()
    assert backend.name == "cpu"
    assert backend.geometry == geometry(pool, 3)
    assert (backend.geometry.k_scale, backend.geometry.layout) == (2.0, "HND")
    backend.close()


def test_a_fraction_of_this_machine_is_some_pages() -> None:
    small = PoolSettings(memory_fraction=1e-4, num_layers=1, page_size=1, head_dim=1)
    assert num_pages(small, lambda: free_bytes("cpu")) > 0


def test_free_memory_is_what_is_available_or_what_the_container_has_left(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   40 kB\n")
    assert host_free_bytes(meminfo, tmp_path) == 40 * 1024
    (tmp_path / "memory.current").write_text("300\n")
    for limit, left in (("max", 40 * 1024), ("1000", 700), ("200", 0), (str(2**60), 40 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert host_free_bytes(meminfo, tmp_path) == left, limit


def test_a_system_that_does_not_tell_its_memory_wants_num_pages(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(meminfo, tmp_path)
    meminfo.write_text("MemTotal:  100 kB\n")
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(meminfo, tmp_path)
