"""From an engine's answer to the fields and tensors that tell it."""

from __future__ import annotations

from typing import Any

from service.engine.operations import (
    Appended,
    Attended,
    Gathered,
    LevelInfo,
    PageTableInfo,
    PoolInfo,
    SequenceInfo,
    ServiceInfo,
)
from service.http.checks import TENSOR_DTYPES
from service.wire import Tensors

Told = tuple[dict[str, Any], Tensors]


def tell_appended(answer: Appended) -> Told:
    return {"lengths": list(answer.lengths)}, {}


def tell_attended(answer: Attended) -> Told:
    tensors = {"o": answer.o, "lse": answer.lse}
    for index, (o, lse) in enumerate(answer.level_states):
        tensors[f"o.{index}"] = o
        tensors[f"lse.{index}"] = lse
    fields = {
        "lse_base": answer.lse_base,
        "levels": answer.levels,
        "cascade": answer.cascade,
    }
    return fields, tensors


def tell_merged(answer: Attended) -> Told:
    return {"lse_base": answer.lse_base}, {"o": answer.o, "lse": answer.lse}


def tell_gathered(answer: Gathered) -> Told:
    return {"kv_indptr": answer.kv_indptr.tolist()}, {"k": answer.k, "v": answer.v}


def tell_sequence(answer: SequenceInfo) -> dict[str, Any]:
    return {
        "id": answer.id,
        "length": answer.length,
        "lengths": list(answer.lengths),
        "pages": answer.pages,
        "last_page_len": answer.last_page_len,
        "parent": answer.parent,
    }


def tell_table(answer: LevelInfo | PageTableInfo) -> dict[str, Any]:
    """The three arrays of a CSR page table."""
    return {
        "kv_indptr": answer.kv_indptr.tolist(),
        "kv_indices": answer.kv_indices.tolist(),
        "kv_last_page_len": answer.kv_last_page_len.tolist(),
    }


def tell_page_table(answer: PageTableInfo) -> dict[str, Any]:
    levels = [
        {"qo_indptr": level.qo_indptr.tolist()} | tell_table(level) for level in answer.levels
    ]
    return tell_table(answer) | {"levels": levels, "order": answer.order.tolist()}


def tell_pool(answer: PoolInfo) -> dict[str, Any]:
    return {
        "free": answer.free,
        "referenced": answer.referenced,
        "total": answer.total,
        "sequences": answer.sequences,
        "nodes": answer.nodes,
        "sharing_ratio": answer.sharing_ratio,
        "integrity": answer.integrity,
    }


def tell_info(info: ServiceInfo) -> dict[str, Any]:
    """What `/v1/info` says of the pool and the backend."""
    return {
        "backend": info.backend,
        "device": info.device,
        "num_layers": info.num_layers,
        "num_pages": info.num_pages,
        "page_size": info.page_size,
        "num_kv_heads": info.num_kv_heads,
        "head_dim": info.head_dim,
        "layout": info.layout,
        "dtype": info.dtype,
        "k_scale": info.k_scale,
        "v_scale": info.v_scale,
        "tensor_dtypes": list(TENSOR_DTYPES),
        "unsupported": list(info.unsupported),
    }
