"""The Hopper kernel for many query rows, from Python: conditions, variants and arguments.

Nothing here imports cupy or touches a device.

Items are cut to at most a variant's `tile_rows` packed rows, best sorted by cost, dearest first;
any number of keys, zero included (such rows get the empty state). Items whose rows share keys
should be next to each other: they then meet in the L2 cache. `schedule` is two uint32 that are
zero at first; the kernel leaves them zero, and launches that may overlap must not share them. Mask
bits start at a multiple of 4 bytes and need 32 readable bytes after the last; a masked launch comes
after visible.cu has filled the table at `visible`, for its `tile_keys`. For ragged keys `kv_begin`
is the first key's row in k and v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from kernels.backend import DType
from kernels.compile import Spec, spec
from kernels.cuda.common.kernel import definitions
from kernels.cuda.common.structs import STORED_KV
from kernels.cuda.kv.tensor_maps import MAP_BYTES

WideDType = Literal["fp16", "bf16"]

ENTRY: Final = "attend_wide"

PARAMS_AT: Final = 2 * MAP_BYTES
PARAMETERS: Final = (0, MAP_BYTES, PARAMS_AT)
"""Where the kernel's parameters begin in its launch's memory: both maps, then `WideParams`."""
STORED_PARAMETERS: Final = (0, STORED_KV.itemsize)
"""The same where there are no maps (`has_maps`): `StoredKv`, then `WideParams`."""


@dataclass(frozen=True, slots=True)
class WideVariant:
    """One specialisation of the kernel.

    `page_size` 0: ragged keys, or pages of any size: in fp8 pools (`storage`), and `by_token`.
    """

    head_dim: int
    dtype: WideDType
    page_size: int
    storage: DType
    has_mask: bool = False
    has_soft_cap: bool = False
    tile_keys: int = 128
    stages: int = 2
    query_stages: int = 2
    query_registers: bool = False
    consumers: int = 2
    ctas: int = 1
    movers: int = 4
    staged: int = 2
    splits: bool = False
    by_token: bool = False
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Values of a row of V."""
        return self.v_head_dim or self.head_dim

    @property
    def tile_rows(self) -> int:
        """Packed rows of an item, at most."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of a CTA: warps that move data, and warpgroups that multiply."""
        return 32 * self.movers + 128 * self.consumers

    @property
    def blocks(self) -> int:
        """CTAs at a time on a multiprocessor: `kCtas` of shared.cuh."""
        return self.ctas

    @property
    def converts(self) -> bool:
        """Whether K and V are stored as fp8, and converted on their way to the products."""
        return self.storage.startswith("fp8")

    @property
    def is_plain(self) -> bool:
        """Of a 16-bit pool, without a mask or a cap."""
        return not (self.converts or self.has_mask or self.has_soft_cap)

    @property
    def running_here(self) -> int:
        """How many vectors of a consumer thread's running state shared memory has room for."""
        each = 128 * self.consumers * 16
        room = (MOST_SHARED - self._other_bytes) // each
        return max(0, min(1 + self.value_dim // 8, room)) if self.splits else 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, laid out as `Shared` of shared.cuh."""
        return self._other_bytes + self.running_here * 128 * self.consumers * 16

    @property
    def _other_bytes(self) -> int:
        """Shared memory but for running states."""
        tiles = self.stages * self.tile_keys * (self.head_dim + self.value_dim) * 2
        queries = (
            self.query_stages * self.tile_rows * (2 * self.head_dim + 16 * self.query_registers)
        )
        staged = self.staged * self.tile_keys * self.head_dim * self.converts
        rows = (self.query_stages + 2) * self.tile_rows * (24 if self.has_mask else 16)
        units = 4 if self.converts else 2
        barriers = 4 * self.stages + 2 * self.query_stages + 2 * units + 1
        visits = 4 * self.stages if self.has_mask else 0
        return tiles + queries + staged + rows + units * 64 + 8 * barriers + visits

    @property
    def spec(self) -> Spec:
        """The specialisations to compile."""
        return spec(
            "wide/attend_wide",
            **definitions(self.head_dim, self.dtype, self.storage),
            TILE_KEYS=self.tile_keys,
            STAGES=self.stages,
            QUERY_STAGES=self.query_stages,
            PAGE_SIZE=self.page_size,
            QUERIES_IN_REGISTERS=int(self.query_registers),
            CONSUMERS=self.consumers,
            CTAS=self.ctas,
            MOVERS=self.movers,
            STAGED=self.staged,
            HAS_MASK=int(self.has_mask),
            HAS_SOFT_CAP=int(self.has_soft_cap),
            **({} if self.value_dim == self.head_dim else {"VALUE_DIM": self.value_dim}),
            **({"BY_TOKEN": 1} if self.by_token else {}),
            **({"SPLITS": 1, "RUNNING_HERE": self.running_here} if self.splits else {}),
        )


# head_dim -> (key tile, K/V stages, query stages): what 227 KiB and 232 registers hold; and up to
# which head_dim they hold queries in registers. A mask or a soft cap needs registers of its own.
_GENERAL: Final = {64: (128, 3, 2), 128: (128, 2, 2), 192: (64, 3, 1), 256: (64, 2, 1)}
_GENERAL_IN_REGISTERS: Final = 64
_PLAIN: Final = {**_GENERAL, 64: (192, 2, 2)}
_UNEQUAL: Final = {(192, 128): (128, 2, 1)}
"""The same by head_dim and v_head_dim, where these are not equal; queries stay in shared memory."""
_PLAIN_IN_REGISTERS: Final = 128
MOST_SHARED: Final = 227 * 1024
"""Bytes of a CTA's shared memory."""
MOST_RUNNING: Final = 256 * (256 // 2 + 4)
"""Floats of the running states of a CTA: see kRunningFloats of shared.cuh."""
LONG_KEYS: Final = 96
"""Key tile of `long_variant`; pages of 8 tokens leave its data movers no registers."""
_LONG_PAGES: Final = (0, 16, 32)
_PAGE_SIZES: Final = (0, 8, 16, 32, 64)
_PAIRS: Final = {64: 2, 128: 1}
"""K/V stages of two CTAs of 64 rows a multiprocessor, by head_dim."""
# of fp8 pools: more registers for the warps that convert, shared memory for what they convert
_CONVERTING: Final = {64: (128, 2, 2), 128: (128, 2, 1), 192: (64, 2, 1)}
_CONVERTING_GENERAL: Final = {**_CONVERTING, 128: (96, 2, 2)}
_CONVERTING_IN_REGISTERS: Final = 64


def supports(
    arch: str,
    head_dim: int,
    q_dtype: DType,
    kv_dtype: DType,
    page_size: int,
    sm_scale: float,
    v_head_dim: int | None = None,
) -> bool:
    """Whether this kernel runs such work; everything else is the `mma.sync` kernel's, or the plain
    one's where `v_head_dim` is not `head_dim`.

    `sm_scale` must be positive, because maxima are taken before scaling.
    """
    if v_head_dim not in (None, head_dim):
        fits = (head_dim, v_head_dim) in _UNEQUAL and has_maps(kv_dtype, page_size)
        return (
            fits
            and q_dtype == kv_dtype
            and supports(arch, head_dim, q_dtype, kv_dtype, page_size, sm_scale)
        )
    if arch != "sm_90a" or q_dtype not in ("fp16", "bf16") or sm_scale <= 0.0:
        return False
    if kv_dtype.startswith("fp8"):
        return head_dim in _CONVERTING
    return q_dtype == kv_dtype and head_dim in (_PLAIN if has_maps(kv_dtype, page_size) else _PAIRS)


def has_maps(storage: DType, page_size: int) -> bool:
    """Whether the copy engine brings K and V, by tensor maps."""
    return not storage.startswith("fp8") and page_size in _PAGE_SIZES


def variant(
    head_dim: int,
    dtype: WideDType,
    page_size: int,
    has_mask: bool = False,
    has_soft_cap: bool = False,
    storage: DType | None = None,
    v_head_dim: int | None = None,
) -> WideVariant:
    """The tuned specialisation for supported work; `storage` is `dtype` unless given."""
    general, by_token = has_mask or has_soft_cap, False
    in_registers = head_dim <= (_GENERAL_IN_REGISTERS if general else _PLAIN_IN_REGISTERS)
    sizes = (_GENERAL if general else _PLAIN)[head_dim]
    if storage is not None and storage.startswith("fp8"):
        sizes, page_size = (_CONVERTING_GENERAL if general else _CONVERTING)[head_dim], 0
        in_registers = head_dim <= _CONVERTING_IN_REGISTERS
    elif page_size not in _PAGE_SIZES:
        by_token, page_size = True, 0
    elif v_head_dim not in (None, head_dim):
        sizes = _UNEQUAL[head_dim, v_head_dim or head_dim]
    made = WideVariant(
        head_dim,
        dtype,
        page_size,
        storage or dtype,
        has_mask,
        has_soft_cap,
        *sizes,
        query_registers=in_registers,
        by_token=by_token,
        v_head_dim=v_head_dim,
    )
    return _pair(made) if by_token else made


def short_variant(usual: WideVariant) -> WideVariant | None:
    """Of batches of short sequences: two CTAs of 64 rows a multiprocessor. None: there is none."""
    if usual.head_dim != 128 or not usual.is_plain or usual.by_token:
        return None
    return replace(usual, tile_keys=64, consumers=1, ctas=2)


def long_variant(usual: WideVariant) -> WideVariant | None:
    """Of batches of long sequences: 192 rows a CTA, where weights cost more than products."""
    if usual.head_dim != 64 or not usual.is_plain or usual.by_token:
        return None
    if usual.page_size not in _LONG_PAGES:
        return None
    return replace(usual, tile_keys=LONG_KEYS, stages=3, consumers=3)


def joining_variant(usual: WideVariant) -> WideVariant:
    """That joins the fixed splits of a run; with one buffer of queries where they leave it at once,
    so that shared memory has room for more of the running states. With two tiles of fp8 staged, a
    soft cap spills."""
    stages = 1 if usual.query_registers else usual.query_stages
    staged = max(usual.staged, 3) if usual.converts and usual.has_soft_cap else usual.staged
    return replace(usual, splits=True, query_stages=stages, staged=staged)


def few_variant(usual: WideVariant) -> WideVariant:
    """Of 64 rows with the same arithmetic: half the products. Bound by memory, so with more tiles
    under way, and twice the warps that convert those of fp8 pools."""
    made = replace(usual, consumers=1, query_stages=1)
    if usual.converts:
        return replace(made, staged=4, movers=8)
    more = (replace(made, stages=made.stages + n) for n in (2, 1))
    return next((deeper for deeper in more if deeper.shared_bytes <= MOST_SHARED), made)


def pair_variant(usual: WideVariant) -> WideVariant | None:
    """Of 64 rows with the same arithmetic: two CTAs a multiprocessor. None: there is none.

    A unit's cost beside its products falls under the other CTA's.
    """
    return _pair(usual) if usual.head_dim in _PAIRS and usual.is_plain else None


def alone_variants(usual: WideVariant) -> dict[str, WideVariant]:
    """Of batches that one kernel takes, where others would have several: the usual one, one of 64
    rows ("few"), and two CTAs of it a multiprocessor."""
    if usual.has_mask or usual.has_soft_cap or (usual.converts and usual.head_dim < 128):
        return {}  # not measured
    if usual.by_token:
        return {"wide": usual}
    pair = pair_variant(usual)
    made = {"wide": usual, "few": few_variant(usual)}
    return made if pair is None else made | {"pair": pair}


def _pair(usual: WideVariant) -> WideVariant:
    """Queries stay in shared memory, as there are 216 registers; a mask and a cap want more."""
    few = replace(usual, consumers=1, query_stages=1, query_registers=False)
    ctas = 1 if usual.has_mask and usual.has_soft_cap else 2
    return replace(few, ctas=ctas, stages=_PAIRS[usual.head_dim])


def heads_together(num_kv_heads: int, num_items: int, num_runs: int, alike: bool = True) -> int:
    """How many kv heads the CTAs work on at a time (`head_block`), by row tiles per run of keys.
    `alike`: rows of K and V are of one size.

    Measured: tiles that read the same keys at the same time find them in the L2 cache, so few heads
    are best; but with hundreds of tiles on one run, all CTAs would read the same lines at once.
    Prefills of models whose rows are not alike have a kv head for each query head, and so few tiles
    a head that the last heads' longest would end late: 16 heads 1.14 times as fast by all of them.
    """
    wanted = 16 if not alike else 4 if num_items > 128 * num_runs else 2
    return max(n for n in (1, 2, 4, 8, 16) if n <= wanted and num_kv_heads % n == 0)
