"""Room for records: who has it, and what a start refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.sections import CacheSettings
from config.settings import Settings, SettingsError, load_settings
from kernels import make_backend
from service.engine.records.pool import RecordPool
from tests.engine.fake_backend import GEOMETRY
from tests.engine.harness import running_engine

NONE = ["--backend.kind", "none"]
REFUSED = [
    (NONE, "backend.kind = none: records need a tier: set cache.host_bytes or cache.disk_path"),
    (["--cache.records-share", "0.5"], "cache.records_share = 0.5: records need a tier"),
    (
        [*NONE, "--cache.host-bytes", "1MiB", "--cache.records-share", "0.5"],
        "with backend.kind = none there are no pages: leave it out",
    ),
    (
        ["--cache.host-bytes", "1MiB", "--cache.records-share", "1", "--cluster.engines", "2"],
        "records are for a service of one engine",
    ),
    (
        [*("--cache.disk-path", "/x", "--cache.disk-bytes", "1GiB", "--cache.records-share", ".5")],
        "page keys do not cover the model's weights",
    ),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_a_start_without_room_is_refused_with_its_reason(arguments: list[str], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason.replace(".", r"\.")):
        load_settings(arguments)


def test_a_disk_of_records_alone_needs_no_model() -> None:
    disk = ("--cache.disk-path", "/x", "--cache.disk-bytes", "1GiB")
    for more in (NONE, ["--cache.records-share", "1"]):
        settings = load_settings([*disk, *more])
        assert settings.records_share == 1.0 and settings.cache_of_pages.disk_path is None


@pytest.mark.parametrize("share", [None, 0.25, 1.0])
def test_pages_and_records_share_the_tiers(tmp_path: Path, share: float | None) -> None:
    mib = 2**20
    cache = CacheSettings(
        host_bytes=8 * mib,
        disk_path=str(tmp_path / "disk"),
        disk_bytes=16 * mib,
        model="m@1",
        records_share=share,
    )
    with running_engine(make_backend("cpu", GEOMETRY), Settings(cache=cache)) as running:
        store, part = running.engine.store, share or 0.0
        assert (store.records is None) == (share is None)
        assert (store.loading is None) == (share == 1.0)
        if store.records is not None:
            described = store.records.describe()
            assert described == {"host_bytes": part * 8 * mib, "disk_bytes": part * 16 * mib}
        if store.loading is not None:
            tiers = store.loading.tiers
            held = tiers.host.num_slots * tiers.layout.block_bytes
            assert 0.9 * (1 - part) * 8 * mib < held <= (1 - part) * 8 * mib
        for one in store.lower:
            one.set_limits("a", 4 * mib, 8 * mib)
            assert one.limits_of("a") == {"max_host_bytes": 4 * mib, "max_disk_bytes": 8 * mib}
            limit = one.host._owners["a"].limit
            own = part if isinstance(one, RecordPool) else 1 - part
            size = one.memory.nbytes if isinstance(one, RecordPool) else one.records.nbytes
            assert limit is not None
            assert limit * (size // one.host.num_slots) <= own * 4 * mib
