"""Everything that is compiled before a service starts."""

from __future__ import annotations

from itertools import product

from kernels.backend import TENSOR_DTYPES, DType, LayerGroup, Numerics, Scoring, split_keys
from kernels.compile import Spec
from kernels.cuda.attention.config import AttentionShape
from kernels.cuda.attention.kernel_sets import SPLIT_KEYS, kernel_sets
from kernels.cuda.attention.kernels import attend_kernels, wide_variant
from kernels.cuda.masks import expand
from kernels.cuda.merge.variants import BATCHES, IN_ORDER, PARTIAL_BATCHES, merge_spec
from kernels.cuda.narrow.variants import few_rows_kernels, short_decode_kernels
from kernels.cuda.pages.copies import PAGES_SPEC
from kernels.cuda.rows.variants import rows_spec, stored_spec
from kernels.cuda.visible import table as visible
from kernels.cuda.wide import variants as wide


def group_specs(arch: str, group: LayerGroup, numerics: Numerics = "fast") -> tuple[Spec, ...]:
    """Everything a service launches for a group of layers. Of rows of two sizes, ragged attention
    and the plain kernel are compiled when they are used first."""
    if group.kind == "attention" and group.head_dim == group.v_head_dim:
        return service_specs(arch, group.head_dim, group.dtype, group.page_size, numerics)
    keys, values = group.stored_dims
    specs = [visible.SPEC, PAGES_SPEC, stored_spec(keys, group.dtype, values)]
    specs += [rows_spec(keys, tensor, group.dtype, values) for tensor in TENSOR_DTYPES]
    in_order = (True,) if numerics == "invariant" else ()
    fp8 = group.dtype.startswith("fp8")
    computes: tuple[DType, ...] = ("fp16", "bf16") if fp8 else (group.dtype,)
    for compute in computes:
        for cap, masked in product((0.0, 1.0), (False, True)):
            specs += _set_specs(arch, group, compute, Scoring(1.0, cap), masked, numerics)
        batches = PARTIAL_BATCHES if numerics == "fast" else (*PARTIAL_BATCHES, IN_ORDER)
        dim = group.v_head_dim
        specs += [merge_spec(dim, True, compute, batch, *in_order) for batch in batches]
    for tensor, dim, batch in product(TENSOR_DTYPES, (group.v_head_dim, 0), BATCHES):
        specs.append(merge_spec(dim, False, tensor, batch, *in_order))
    return tuple(dict.fromkeys(specs))


def _set_specs(
    arch: str,
    group: LayerGroup,
    compute: DType,
    scoring: Scoring,
    masked: bool,
    numerics: Numerics,
) -> list[Spec]:
    """The kernels of all sets of a group of layers."""
    shape = AttentionShape(
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        v_head_dim=group.v_head_dim,
        latent=group.kind == "latent",
        dtype=group.dtype,
        page_size=group.page_size,
        page_bytes=group.layer_bytes,
        contiguous=False,
        num_qo_heads=group.num_kv_heads,
        compute=compute,
        scoring=scoring,
        masked=masked,
    )
    split = split_keys(numerics, SPLIT_KEYS, group.page_size)
    sets = kernel_sets(shape, arch, 1, split, group.page_size).values()
    kernels = [kernel for one in sets for kernel in (*one.kernels, one.joining) if kernel]
    return [kernel.spec for kernel in kernels]


def service_specs(
    arch: str, head_dim: int, dtype: DType, page_size: int, numerics: Numerics = "fast"
) -> tuple[Spec, ...]:
    """Everything a service with such a pool launches, ragged attention and merges included."""
    fp8 = dtype.startswith("fp8")
    computes: tuple[DType, ...] = ("fp16", "bf16") if fp8 else (dtype,)
    in_order = (True,) if numerics == "invariant" else ()
    specs = [visible.SPEC, expand.SPEC, PAGES_SPEC, stored_spec(head_dim, dtype)]
    for compute in computes:
        for storage in dict.fromkeys((dtype, compute)):
            pooled = storage == dtype  # else of ragged keys alone, which no two sequences share
            options = (arch, head_dim, compute, storage)
            page = page_size if pooled or numerics == "invariant" else 0  # as `kernel_sets` asks
            plain = wide_variant(*options, page, Scoring(1.0), False)
            for general, variant in ((False, plain), (True, None)):  # general: a scale <= 0, too
                kernels = attend_kernels(*options, general, variant)
                specs += [kernel.spec for kernel in kernels]
            for made in (few_rows_kernels, short_decode_kernels) if pooled else ():
                specs += [kernel.spec for kernel in made(*options).values()]
            sizes = (page_size, 0) if pooled else (0,)
            specs += _wide_specs(*options, sizes, numerics)
        batches = PARTIAL_BATCHES if numerics == "fast" else (*PARTIAL_BATCHES, IN_ORDER)
        specs += [merge_spec(head_dim, True, compute, batch, *in_order) for batch in batches]
    for tensor in TENSOR_DTYPES:
        specs.append(rows_spec(head_dim, tensor, dtype))
        dims = (head_dim, 0)
        specs += [merge_spec(dim, False, tensor, b, *in_order) for dim in dims for b in BATCHES]
    return tuple(dict.fromkeys(specs))


def _wide_specs(
    arch: str,
    head_dim: int,
    compute: DType,
    storage: DType,
    sizes: tuple[int, ...],
    numerics: Numerics,
) -> list[Spec]:
    """Hopper's kernels for pages of `sizes`, 0 for ragged keys, with and without mask and cap."""
    variants = [
        wide_variant(arch, head_dim, compute, storage, size, Scoring(1.0, cap), masked)
        for size in sizes
        for cap in (0.0, 1.0)
        for masked in (False, True)
    ]
    usual = [variant for variant in variants if variant is not None]
    others = [made for v in usual for made in (wide.short_variant(v), wide.long_variant(v)) if made]
    if numerics == "invariant":
        several = [variant for variant in usual if not variant.by_token]
        pairs = [made for v in several if (made := wide.pair_variant(v))]
        several += map(wide.few_variant, several.copy())
        others = [wide.joining_variant(variant) for variant in several if not variant.has_mask]
        usual += several + pairs
    else:
        pools = [one for one in usual if one.page_size or one.converts]
        others += [alone for one in pools for alone in wide.alone_variants(one).values()]
    return [variant.spec for variant in (*usual, *others)]
