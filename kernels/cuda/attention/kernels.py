"""The attention kernels with the rows that each takes, and their costs for the planner."""

from __future__ import annotations

from kernels.backend import NUMPY_DTYPES, DType, Scoring, Unsupported
from kernels.cuda.attention.config import AttentionShape
from kernels.cuda.common.kernel import HEAD_DIMS, Kernel
from kernels.cuda.latent import variants as latent
from kernels.cuda.narrow.variants import LONG_ROWS, NARROW_RUN, narrow_kernel
from kernels.cuda.plain.variants import plain_kernel
from kernels.cuda.plan.costs import H200
from kernels.cuda.plan.tiles import TileShape
from kernels.cuda.tile.variants import tile_kernel
from kernels.cuda.wide import variants as wide


def wide_variant(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    page_size: int,
    scoring: Scoring,
    masked: bool,
    v_head_dim: int | None = None,
) -> wide.WideVariant | None:
    """Hopper's specialisation for such work, if it runs it; `page_size` 0 is ragged.

    `v_head_dim` None: as `head_dim`.
    """
    options = (arch, head_dim, compute, storage, page_size, scoring.sm_scale, v_head_dim)
    if not wide.supports(*options):
        return None
    dtype: wide.WideDType = "bf16" if compute == "bf16" else "fp16"
    capped = scoring.logits_soft_cap > 0
    return wide.variant(head_dim, dtype, page_size, masked, capped, storage, v_head_dim)


def wide_kernel(variant: wide.WideVariant) -> Kernel:
    return Kernel(
        spec=variant.spec,
        entry=wide.ENTRY,
        rows=variant.tile_rows,
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        blocks=variant.blocks,
        tile_keys=variant.tile_keys,
    )


def attend_kernels(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    general: bool,
    variant: wide.WideVariant | None = None,
) -> tuple[Kernel, ...]:
    """The kernels for growing numbers of packed rows, each row count served by the first fit.

    Segments that the narrow kernels do not take are Hopper's `variant`'s, or the tile kernels'.
    """
    if head_dim not in HEAD_DIMS:
        raise Unsupported("head_dim", head_dim, f"the CUDA backend has {HEAD_DIMS}")
    options = (head_dim, compute, storage, general)
    narrow = [narrow_kernel(arch, *options, 1)]
    if head_dim <= LONG_ROWS:
        narrow.append(narrow_kernel(arch, *options, 2))
    if variant is not None:
        return (*narrow, wide_kernel(variant))
    tiles = [tile_kernel(arch, *options, m) for m in (1, 2)]
    return (*narrow, *(tiles if tiles[0] != tiles[1] else tiles[:1]))


def only_kernel(config: AttentionShape, arch: str, page_size: int) -> Kernel | None:
    """The kernel that takes all rows of a latent pool, or of rows of K and V of such sizes that no
    other does; None where `attend_kernels` and `wide_variant` have some. `page_size` 0 is ragged.
    """
    dims, scoring = config.dims, config.scoring
    if config.latent:
        how = (config.compute, config.dtype, page_size, scoring.sm_scale)
        if latent.supports(arch, dims, *how):
            capped = scoring.logits_soft_cap > 0
            return latent.latent_kernel(config.dtype, page_size, config.masked, capped)
    elif dims[0] == dims[1] or wide.supports(
        arch,
        dims[0],
        config.compute,
        config.dtype,
        page_size,
        scoring.sm_scale,
        dims[1],
    ):
        return None
    return plain_kernel(dims, config.latent, config.compute, config.dtype)


def planner_shape(
    kernel: Kernel,
    config: AttentionShape,
    multiprocessors: int,
    largest: bool,
    few_rows: bool = False,
) -> TileShape:
    """A kernel's costs for the planner; the largest kernel takes every segment left.

    By a warp's bytes where memory is no limit, or by what a worker multiplies. `few_rows`: a
    decode's group is served by the kernel for few rows.
    """
    narrow, wide = kernel.entry == "attend_narrow", kernel.entry == "attend_wide"
    hopper, dims = wide or kernel.entry == latent.ENTRY, config.dims
    values = dims[0] if config.latent else sum(dims)
    token_bytes = values * NUMPY_DTYPES[config.dtype].itemsize
    costs, wide_flops = H200, H200.wide_flops
    if dims == (64, 64):
        wide_flops = costs.thin_flops.get(kernel.rows, wide_flops)
    reached = (wide_flops if hopper else costs.tile_flops) / costs.multiprocessors / kernel.blocks
    flops = 2 * sum(dims) * kernel.rows
    many_seconds = flops / reached
    if hopper and kernel.rows == 64 and kernel.tile_keys > 64:
        many_seconds = max(many_seconds, token_bytes * kernel.blocks / costs.wide_bytes)
    warps = kernel.threads // 32 if narrow else 1
    narrow_item = costs.few_item if few_rows else costs.narrow_item
    narrow_bytes = costs.few_bytes if few_rows else costs.narrow_bytes
    many_item = costs.latent_item if kernel.entry == latent.ENTRY else costs.tile_item
    many_item = costs.wide_item if wide else many_item
    return TileShape(
        name=kernel.entry,
        rows=kernel.rows,
        most_rows=2**30 if largest else kernel.rows,
        workers=multiprocessors * kernel.blocks * warps,
        granule=kernel.tile_keys,
        persistent=narrow,
        least_run=NARROW_RUN if narrow else 256,
        item_seconds=narrow_item if narrow else many_item,
        key_seconds=token_bytes / narrow_bytes if narrow else many_seconds,
        heads_at_once=2
        if wide and dims[0] == dims[1]
        else 0,  # wide.heads_together, but for hundreds of tiles on one run
        teams=tuple(t for t in range(1, warps + 1) if warps % t == 0),
        partial_seconds=costs.partial * dims[1] / 128,
        ahead=wide,
    )
