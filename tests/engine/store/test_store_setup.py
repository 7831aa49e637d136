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


@pytest.mark.parametrize("problem", ["the NVIDIA driver is too old: install another", ""])
def test_auto_warns_once_of_a_driver_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    monkeypatch.setattr("service.engine.store.setup.cuda_devices", lambda: 0)
    monkeypatch.setattr("service.engine.store.setup.driver_problem", lambda: problem)
    for kind in ("auto", "cpu"):
        open_backend(PoolSettings(num_pages=1, num_layers=1), BackendSettings(kind=kind)).close()
    warned = [f"backend.kind = auto uses the CPU: {problem}"] * bool(problem)
    assert caplog.messages == warned


def test_a_fraction_of_this_machine_is_some_pages() -> None:
    small = PoolSettings(memory_fraction=1e-4, num_layers=1, page_size=1, head_dim=1)
    assert num_pages(small, lambda: free_bytes("cpu")) > 0


MIB = 2**20
V2 = {"memory.max": "max", "memory.current": str(900 * MIB)}
LIMITED = {"memory.max": str(8 * MIB), "memory.current": str(5 * MIB)}
V1 = {"memory.limit_in_bytes": str(8 * MIB), "memory.usage_in_bytes": str(5 * MIB)}
UNLIMITED_V1 = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": str(9 * MIB)}
FILES = f"active_file {MIB}\ninactive_file {2 * MIB}\n"
STAT = {"memory.stat": f"anon {MIB}\nfile {4 * MIB}\n{FILES}slab_reclaimable {MIB // 2}"}
TOTALS = {"memory.stat": f"active_file 1\n{FILES}total_active_file {MIB}\ntotal_inactive_file 7"}
TREES = {  # /proc/self/cgroup, files by their groups, free MiB of 40 that are available
    "v2, a container's root": ("0::/\n", {"": LIMITED}, 3),
    "v2, no limit": ("0::/\n", {"": V2}, 40),
    "v2, more used than allowed": ("0::/\n", {"": LIMITED | {"memory.max": str(MIB)}}, 0),
    "v2, no namespace": ("0::/docker/ab12\n", {"": LIMITED}, 3),
    "v2, outside of the namespace": ("0::/../x\n", {"": LIMITED, "x": V2 | {"memory.max": "1"}}, 3),
    "v2, page cache": ("0::/a\n", {"a": LIMITED | STAT}, 6.5),
    "v2, throttled first": ("0::/a\n", {"a": LIMITED | {"memory.high": str(7 * MIB)}}, 2),
    "systemd, a unit": ("0::/system.slice/x.service\n", {"system.slice/x.service": LIMITED}, 3),
    "systemd, its slice": (
        "0::/a.slice/a-b.slice/x.service\n",
        {"a.slice/a-b.slice/x.service": V2, "a.slice/a-b.slice": V2, "a.slice": LIMITED},
        3,
    ),
    "v1": ("5:cpu:/\n4:memory:/docker/ab\n", {"memory/docker/ab": V1, "memory": UNLIMITED_V1}, 3),
    "v1, no namespace": ("3:hugetlb,memory:/docker/ab\n0::/x\n", {"memory": V1}, 3),
    "v1, nested": ("4:memory:/a/b\n", {"memory/a/b": UNLIMITED_V1, "memory/a": V1 | TOTALS}, 4),
    "both, limited by v2": (
        "4:memory:/\n0::/a.slice/b\n",
        {"memory": UNLIMITED_V1, "unified/a.slice": LIMITED, "unified/a.slice/b": V2},
        3,
    ),
    "a name with a colon": ("0::/a:b\n", {"a:b": LIMITED}, 3),
    "none": ("", {"": LIMITED}, 40),
}


@pytest.mark.parametrize("name", TREES)
def test_free_memory_is_the_least_that_the_machine_and_the_control_groups_leave(
    tmp_path: Path, name: str
) -> None:
    mine, groups, free = TREES[name]
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {40 * 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", mine)
    for group, files in groups.items():
        for file, text in files.items():
            write(tmp_path / "sys/fs/cgroup" / group / file, f"{text}\n")
    assert host_free_bytes(tmp_path) == int(free * MIB) + 7 * ("nested" in name)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_system_without_memory_figures_needs_num_pages(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(tmp_path)
    write(tmp_path / "proc/meminfo", "MemTotal:  100 kB\n")
    with pytest.raises(RuntimeError, match=r"set pool\.num_pages"):
        host_free_bytes(tmp_path)
    write(tmp_path / "proc/meminfo", "MemAvailable:  100 kB\n")
    assert host_free_bytes(tmp_path) == 100 * 1024
