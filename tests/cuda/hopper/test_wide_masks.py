"""Tables of visible key tiles, host side: sizes, struct layouts, the kernel that fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from kernels.backend import Level, Plan, Scoring
from kernels.compile import ARCHITECTURES, Spec, compile_spec
from kernels.cuda.attention import device_plan as device_plan_module
from kernels.cuda.attention.config import AttentionConfig
from kernels.cuda.attention.device_plan import DevicePlanBuilder
from kernels.cuda.attention.steps import CallAddresses
from kernels.cuda.common.structs import ATTEND_PARAMS, VISIBLE_PARAMS, VISIBLE_TABLE, WIDE_PARAMS
from kernels.cuda.kv import tensor_maps
from kernels.cuda.kv.ragged import ragged_plan, ragged_view
from kernels.cuda.kv.tensor_maps import MapShape, TensorMaps
from kernels.cuda.kv.view import KvView
from kernels.cuda.visible import table as visible
from kernels.cuda.wide import variants as wide


def items_of(*num_keys: int) -> np.ndarray:
    items = np.zeros((len(num_keys), 8), np.int32)
    items[:, 4] = num_keys
    return items


@pytest.mark.parametrize(
    ("num_keys", "words"), [((0,), 1), ((4096,), 1), ((4097,), 2), ((5, 20000, 1), 5)]
)
def test_a_table_has_words_for_the_longest_run_of_any_item(
    num_keys: tuple[int, ...], words: int
) -> None:
    assert visible.table_words(items_of(*num_keys), 128) == words


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_finder_compiles_without_spills(arch: str) -> None:
    resources = compile_spec(visible.SPEC, arch).resources
    assert resources.stack_bytes == 0, resources
    assert resources.spill_bytes == 0, resources
    assert resources.registers <= 65536 // visible.THREADS, resources


@dataclass
class Settled:
    """A fake `Launcher`."""

    device: Device
    entry: str
    grid: int
    memory: bytearray
    parameters: tuple[int, ...]

    def __call__(self) -> None:
        last = bytes(self.memory[self.parameters[-1] :])
        self.device.launches.append((self.entry, self.grid, last))


class Device:
    """A fake library and transfers: records the last struct of each launch."""

    def __init__(self, arch: str) -> None:
        self.arch, self.overlaps = arch, False
        self.launches: list[tuple[str, int, bytes]] = []
        self.specs: list[Spec] = []

    def function(self, spec: Spec, entry: str, shared_bytes: int = 0) -> str:
        self.specs.append(spec)
        return entry

    def launcher(
        self,
        entry: str,
        grid: int,
        _: int,
        __: int,
        struct: bytes,
        parameters: Any = (0,),
        overlaps: bool = False,
    ) -> Settled:
        return Settled(self, entry, grid, bytearray(struct), parameters)

    def upload_ints(self, arrays: Any) -> tuple[Any, list[int]]:
        self.uploaded = [len(array) for array in arrays]
        return None, [1000 * (i + 1) for i in range(len(arrays))]


def launch_once(
    device: Device, config: AttentionConfig, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of a plan's launches, on two multiprocessors."""
    monkeypatch.setattr(device_plan_module, "Launcher", device.launcher)
    builder = DevicePlanBuilder(config, device, 2, 0)  # type: ignore[arg-type]
    device_plan = builder.make([(0, plan)], device, team=None)  # type: ignore[arg-type]
    for step in (*device_plan.steps, *device_plan.beside):
        step.launch(CallAddresses(0, 1, 2, 3, 4, 5, 606, 707, 0, 0))


def masked_launches(
    device: Device, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> list[tuple[str, int, bytes]]:
    """Launches of 512 rows over 10000 keys with 2 query heads on 1 kv head."""
    maps = TensorMaps(bytes(wide.PARAMS_AT), 2, 0)
    strides = {"layer_bytes": 0, "layer_rows": 0, "page_rows": 32, "token_rows": 1, "head_rows": 1}
    pool = {"page_size": 16, "num_kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    pool |= {"dtype": "fp16", "num_pages": 625}
    rest = {"k_scale": 1.0, "v_scale": 1.0, "contiguous": False, "maps": lambda *_: maps}
    config = AttentionConfig(
        KvView(k=1, v=2, **strides, **pool, **rest), 2, "fp16", Scoring(0.1), masked
    )
    level = Level(
        qo_indptr=np.array([0, 512], np.int32),
        kv_indptr=np.array([0, 625], np.int32),
        kv_indices=np.arange(625, dtype=np.int32),
        kv_last_page_len=np.array([16], np.int32),
        kv_start=np.zeros(1, np.int32),
        causal=False,
    )
    launch_once(device, config, Plan((level,), np.arange(512, dtype=np.int32)), monkeypatch)
    return device.launches


@pytest.mark.parametrize(
    ("arch", "entry", "tile_keys"), [("sm_90a", "attend_wide", 128), ("sm_80", "attend_tile", 64)]
)
def test_a_masked_batch_finds_its_tiles_and_hands_their_table_on(
    arch: str, entry: str, tile_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(arch)
    finder, attend = masked_launches(device, monkeypatch, masked=True)
    assert (finder[0], attend[0]) == ("find_visible", entry)
    found = np.frombuffer(finder[2], VISIBLE_PARAMS)[0]
    assert (int(found["tile_keys"]), int(found["group_size"])) == (tile_keys, 2)
    assert (int(found["mask_bits"]), int(found["mask_row_offsets"])) == (606, 707)
    words = int(found["words"])
    assert words == -(-10000 // (32 * tile_keys))
    if entry == "attend_wide":
        block = np.frombuffer(attend[2], WIDE_PARAMS)[0]
        assert (int(block["head_blocks"]), int(block["head_groups"])) == (2, 0)
        assert [int(block[name]) for name in ("q", "o", "lse")] == [1, 2, 3]
        assert (int(block["mask_bits"]), int(block["mask_row_offsets"])) == (606, 707)
        handed = (int(block["visible"]), int(block["visible_words"]))
        items, num_items = int(block["items"]), int(block["num_items"])
    else:
        table = np.frombuffer(attend[2][ATTEND_PARAMS.itemsize :][: VISIBLE_TABLE.itemsize])
        handed = tuple(int(x) for x in table.view(VISIBLE_TABLE)[0])
        items = int(np.frombuffer(attend[2][: ATTEND_PARAMS.itemsize], ATTEND_PARAMS)[0]["items"])
        num_items = attend[1]
    assert handed == (int(found["tiles"]), words)
    assert device.uploaded[handed[0] // 1000 - 1] == 2 * num_items * words
    assert int(found["items"]) == items
    assert finder[1] == num_items * words


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_batch_without_a_mask_looks_for_nothing(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((entry, _, struct),) = masked_launches(Device(arch), monkeypatch, masked=False)
    if entry == "attend_tile":
        assert struct[ATTEND_PARAMS.itemsize :] == bytes(VISIBLE_TABLE.itemsize)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("cap", [0.0, 30.0], ids=["", "capped"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_box_of_ragged_keys_has_the_size_that_the_kernel_awaits(
    head_dim: int, cap: float, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[tuple[int, ...]] = []

    def encode(shape: MapShape, address: int, dtype: str) -> bytes:
        boxes.append(shape.box)
        return bytes(tensor_maps.MAP_BYTES)

    device = Device("sm_90a")
    monkeypatch.setattr(tensor_maps, "_encode", encode)
    kv = ragged_view(1, head_dim, "fp16", 1 << 20, 1 << 21, 300)
    indptr = np.array([0, 300], np.int32)
    config = AttentionConfig(kv, 1, "fp16", Scoring(0.1, cap), masked)
    launch_once(device, config, ragged_plan(indptr, indptr, causal=True), monkeypatch)
    (kernel,) = (spec for spec in device.specs if spec.source == "wide/attend_wide")
    tile = next(o.split("=")[1] for o in kernel.options if o.startswith("-DTILE_KEYS="))
    assert boxes == [(64, int(tile), 1)] * 2
