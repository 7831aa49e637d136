"""How settings become a pool: pages as reply, or a share of the memory that is free."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from config.settings import MAX_SLOTS, BackendSettings, PoolSettings
from kernels.backend import Unsupported
from kernels.memory import free_bytes, host_free_bytes
from service.engine.store.setup import (
    PoolTooSmall,
    geometry,
    group_answers,
    num_pages,
    open_backend,
)

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


GROUPS = (
    {"layers": [0, 2, 4], "num_kv_heads": 8, "head_dim": 64, "window": 128},
    {"layers": [3, 1, 5], "num_kv_heads": 4, "head_dim": 128, "dtype": "bf16"},
)


def test_groups_have_the_pool_s_page_size_or_tokens_per_page_that_waste_less() -> None:
    pool = PoolSettings.model_validate({"page_size": 32, "groups": GROUPS, "num_pages": 9})
    windowed, full = geometry(pool, 9).groups
    assert (full.layers, full.num_kv_heads, full.head_dim) == ((1, 3, 5), 4, 128)
    assert (full.page_size, full.dtype, full.window) == (32, "bf16", None)
    assert (windowed.page_size, windowed.dtype, windowed.window) == (32, "fp16", 128)
    assert geometry(pool, 9).payload_bytes == full.page_bytes == windowed.page_bytes


def test_a_share_of_the_memory_is_pages_of_all_groups() -> None:
    pool = PoolSettings.model_validate({"page_size": 32, "groups": GROUPS, "memory_fraction": 0.5})
    page = geometry(pool, 1).payload_bytes
    assert num_pages(pool, lambda: 20 * page + 1) == 10


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        ([{"layers": [0, 2], "num_kv_heads": 1, "head_dim": 8}], "layer 1 is in no group"),
        (
            [{"layers": [0], "num_kv_heads": 1, "head_dim": 8}] * 2,
            "pool.groups.1.layers: layer 0 is in group 0 too",
        ),
        (
            [{"layers": [0], "num_kv_heads": 1, "head_dim": 8, "window": 4}],
            "one group must have no window",
        ),
        ([{"layers": [0], "num_kv_heads": 1}], "head_dim: must be given in a group of kind att"),
        (
            [{"layers": [0], "num_kv_heads": 1, "head_dim": 8, "latent_dim": 8}],
            "latent_dim: must be left out",
        ),
        ([{"layers": [0], "kind": "latent", "latent_dim": 8}], "rope_dim: must be given"),
        ([{"layers": [], "num_kv_heads": 1, "head_dim": 8}], "at least 1"),
    ],
)
def test_groups_that_make_no_pool_are_refused_by_name(groups, rule) -> None:
    with pytest.raises(ValidationError, match=rule):
        PoolSettings.model_validate({"groups": groups})


def test_what_groups_decide_is_not_set_beside_them() -> None:
    groups = [{"layers": [0], "num_kv_heads": 1, "head_dim": 8}]
    with pytest.raises(ValidationError, match=r"pool.head_dim = 8: pool.groups has it"):
        PoolSettings.model_validate({"groups": groups, "head_dim": 8})
    with pytest.raises(ValidationError, match=r"window_slack = 4: no layers have a window"):
        PoolSettings(window_slack=4)


def test_info_lists_the_groups_and_what_pads_their_pages() -> None:
    groups = [
        {"layers": [1, 2, 4], "num_kv_heads": 1, "head_dim": 8},
        {"layers": [0, 3], "num_kv_heads": 1, "head_dim": 8},
    ]
    pool = PoolSettings.model_validate({"groups": groups, "num_pages": 2})
    one, two = group_answers(geometry(pool, 2)) or ()
    assert (one.layers, two.layers) == ([1, 2, 4], [0, 3])
    assert (one.padding, two.padding) == (0.0, pytest.approx(1 / 3))
    assert one.page_bytes == 3 * 16 * 2 * 8 * 2
    assert group_answers(geometry(PoolSettings(), 2)) is None


def test_latent_groups_wait_for_operations_that_take_their_rows() -> None:
    group = {"layers": [0], "kind": "latent", "latent_dim": 16, "rope_dim": 8}
    pool = PoolSettings.model_validate({"groups": [group], "num_pages": 1})
    assert geometry(pool, 1).groups[0].head_dim == 24
    with pytest.raises(Unsupported, match="no operation takes rows of latent KV"):
        open_backend(pool, BackendSettings(kind="cpu"))
