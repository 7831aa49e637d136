"""Tables of visible key tiles, host side: sizes, struct layouts, the kernel that fills them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")  # which needs no device for what follows

from kernels.backend import Level, Plan, Scoring
from kernels.compile import ARCHITECTURES, SOURCES, Spec, compile_spec
from kernels.cuda import kit as kit_module
from kernels.cuda import tensor_maps, visible, wide
from kernels.cuda.kit import Kit
from kernels.cuda.ragged import ragged_plan, ragged_store
from kernels.cuda.scene import Scene, Store
from kernels.cuda.steps import Call
from kernels.cuda.structs import ATTEND_PARAMS
from kernels.cuda.tensor_maps import MapShape, TensorMaps


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


def fields(source: str, struct: str) -> list[tuple[str, bool]]:
    """Names of a struct's fields, and whether they are pointers."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", (SOURCES / source).read_text(), re.DOTALL)
    assert body is not None
    found = re.findall(r"^  [\w ]+?(\*?) (\w+);", body[1], re.MULTILINE)
    return [(name, star == "*") for star, name in found]


@pytest.mark.parametrize(
    ("source", "struct", "dtype"),
    [
        ("visible.cu", "VisibleParams", visible.PARAMS),
        ("visible.cuh", "VisibleTable", visible.TABLE),
    ],
)
def test_structs_have_the_fields_of_the_source_in_its_order(
    source: str, struct: str, dtype: np.dtype
) -> None:
    names = dtype.names or ()
    assert fields(source, struct) == [(name, dtype[name] == np.uint64) for name in names]
    assert dtype.isalignedstruct


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_finder_compiles_without_spills(arch: str) -> None:
    resources = compile_spec(visible.SPEC, arch).resources
    assert resources.stack_bytes == 0, resources
    assert resources.spill_bytes == 0, resources
    assert resources.registers <= 65536 // visible.THREADS, resources


@dataclass
class Settled:
    """Stands for a Launcher."""

    device: Device
    entry: str
    grid: int
    memory: bytearray
    parameters: tuple[int, ...]

    def __call__(self) -> None:
        last = bytes(self.memory[self.parameters[-1] :])
        self.device.launches.append((self.entry, self.grid, last))


class Device:
    """Stands for the library and the transfers: keeps what each launch got as its last struct."""

    def __init__(self, arch: str) -> None:
        self.arch, self.overlaps = arch, False
        self.launches: list[tuple[str, int, bytes]] = []
        self.specs: list[Spec] = []

    def function(self, spec: Spec, entry: str, shared_bytes: int = 0) -> str:
        self.specs.append(spec)
        return entry

    def launcher(
        self, entry: str, grid: int, _: int, __: int, struct: bytes, parameters: Any = (0,)
    ) -> Settled:
        return Settled(self, entry, grid, bytearray(struct), parameters)

    def upload_ints(self, arrays: Any) -> tuple[Any, list[int]]:
        return None, [1000 * (i + 1) for i in range(len(arrays))]

    def scratch(self, size: int) -> Any:
        return SimpleNamespace(ptr=77 << 20, size=size)


def launch_once(device: Device, scene: Scene, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a plan's launches, on two multiprocessors."""
    monkeypatch.setattr(kit_module, "Launcher", device.launcher)
    kit = Kit(scene, device, 2, 0)  # type: ignore[arg-type]
    resident = kit.make([(0, plan)], device, team=None)  # type: ignore[arg-type]
    for step in (*resident.steps, *resident.beside):
        step.launch(Call(0, 1, 2, 3, 4, 5, 606, 707, 0, 0))


def masked_launches(
    device: Device, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> list[tuple[str, int, bytes]]:
    """Launches of 512 rows over 10000 keys with 2 query heads on 1 kv head."""
    maps = TensorMaps(bytes(wide.ARGUMENTS_AT), 2, 0)
    strides = {"layer_bytes": 0, "layer_rows": 0, "page_rows": 32, "token_rows": 1, "head_rows": 1}
    pool = {"page_size": 16, "num_kv_heads": 1, "head_dim": 128, "dtype": "fp16", "num_pages": 625}
    rest = {"k_scale": 1.0, "v_scale": 1.0, "contiguous": False, "maps": lambda *_: maps}
    scene = Scene(Store(k=1, v=2, **strides, **pool, **rest), 2, "fp16", Scoring(0.1), masked)
    level = Level(
        qo_indptr=np.array([0, 512], np.int32),
        kv_indptr=np.array([0, 625], np.int32),
        kv_indices=np.arange(625, dtype=np.int32),
        kv_last_page_len=np.array([16], np.int32),
        kv_start=np.zeros(1, np.int32),
        causal=False,
    )
    launch_once(device, scene, Plan((level,), np.arange(512, dtype=np.int32)), monkeypatch)
    return device.launches


@pytest.mark.parametrize(
    ("arch", "entry", "tile_keys"), [("sm_90a", "attend_wide", 128), ("sm_80", "attend_tile", 64)]
)
def test_a_masked_batch_finds_its_tiles_and_hands_their_table_on(
    arch: str, entry: str, tile_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder, attend = masked_launches(Device(arch), monkeypatch, masked=True)
    assert (finder[0], attend[0]) == ("find_visible", entry)
    found = np.frombuffer(finder[2], visible.PARAMS)[0]
    assert (int(found["tile_keys"]), int(found["group_size"])) == (tile_keys, 2)
    assert (int(found["mask_bits"]), int(found["mask_row_offsets"])) == (606, 707)
    words = int(found["words"])
    assert words == -(-10000 // (32 * tile_keys))
    if entry == "attend_wide":
        block = np.frombuffer(attend[2], wide.ARGUMENTS)[0]
        assert (int(block["head_blocks"]), int(block["head_groups"])) == (2, 0)
        assert [int(block[name]) for name in ("q", "o", "lse")] == [1, 2, 3]
        assert (int(block["mask_bits"]), int(block["mask_row_offsets"])) == (606, 707)
        handed = (int(block["visible"]), int(block["visible_words"]))
        items, num_items = int(block["items"]), int(block["num_items"])
    else:
        table = np.frombuffer(attend[2][ATTEND_PARAMS.itemsize :][: visible.TABLE.itemsize])
        handed = tuple(int(x) for x in table.view(visible.TABLE)[0])
        items = int(np.frombuffer(attend[2][: ATTEND_PARAMS.itemsize], ATTEND_PARAMS)[0]["items"])
        num_items = attend[1]
    assert handed == (77 << 20, words) == (int(found["tiles"]), words)
    assert int(found["items"]) == items
    assert finder[1] == num_items * words


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_batch_without_a_mask_looks_for_nothing(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((entry, _, struct),) = masked_launches(Device(arch), monkeypatch, masked=False)
    if entry == "attend_tile":
        assert struct[ATTEND_PARAMS.itemsize :] == bytes(visible.TABLE.itemsize)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("cap", [0.0, 30.0], ids=["", "capped"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_box_of_ragged_keys_is_what_the_kernel_waits_for(
    head_dim: int, cap: float, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[tuple[int, ...]] = []

    def encode(shape: MapShape, address: int, dtype: str) -> bytes:
        boxes.append(shape.box)
        return bytes(tensor_maps.MAP_BYTES)

    device = Device("sm_90a")
    monkeypatch.setattr(tensor_maps, "_encode", encode)
    store = ragged_store(1, head_dim, "fp16", 1 << 20, 1 << 21, 300)
    indptr = np.array([0, 300], np.int32)
    scene = Scene(store, 1, "fp16", Scoring(0.1, cap), masked)
    launch_once(device, scene, ragged_plan(indptr, indptr, causal=True), monkeypatch)
    (kernel,) = (spec for spec in device.specs if spec.source == "attend_wide")
    tile = next(o.split("=")[1] for o in kernel.options if o.startswith("-DkTileKeys="))
    assert boxes == [(64, int(tile), 1)] * 2
