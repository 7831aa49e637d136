"""An example of each operation's body and path, for a pool of a given shape.

In the order of the table all of them succeed on an empty pool, those of records where the service
has some. Commits name no tokens, as the append fills one layer only. Leases, pins and imports need
a value of an earlier reply, and have none.
"""

from __future__ import annotations

from typing import Any, Final

from service.operations.status import ENGINE_NAME

DELETED: Final = "chat-2"
PATHS: Final = {"delete_sequence": DELETED, "drain_engine": ENGINE_NAME}
"""The path's parameter of operations for which it is not the usual one."""
USUAL: Final = {"id": "chat-1", "name": "default"}
"""By the parameter's name. Of a lease and an import it is only well-formed."""


def bodies(num_kv_heads: int, head_dim: int, page_size: int) -> dict[str, Any]:
    """By the operation's name."""
    heads, count = [1, num_kv_heads, head_dim], num_kv_heads * head_dim
    row = {"dtype": "F32", "shape": heads, "data": ([1] + [0] * (head_dim - 1)) * num_kv_heads}
    lse = {"dtype": "F32", "shape": [1, 2, num_kv_heads], "data": [0] * (2 * num_kv_heads)}
    o = {"dtype": "F32", "shape": [1, 2, *heads[1:]], "data": [1] * count + [0] * count}
    q, kv = {"q": row}, {"k": row, "v": row}
    chat: dict[str, Any] = {"sequences": ["chat-1"]}
    layer, tokens = chat | {"layer": 0}, list(range(11, 11 + page_size))
    key = tensor("U8", list(b"block-1"))
    block: dict[str, Any] = {"stamp": "org/model@5f0b02c fp16 tp1"}
    block |= {"tensors": {"keys": key, "key_lens": tensor("U8", [7])}}
    stored = {"sizes": tensor("I64", [4]), "values": tensor("U8", [1, 2, 3, 4])}
    return {
        "create_sequences": {
            "sequences": [{"id": "chat-1", "prefix": {"token_ids": tokens}}, {"id": DELETED}]
        },
        "truncate": {"length": 0},
        "page_table": chat,
        "append": layer | {"tensors": kv},
        "gather": layer | {"dtype": "fp32"},
        "decode": layer | {"tensors": q},
        "prefill": layer | {"qo_indptr": [0, 1], "causal": True, "tensors": q | kv},
        "ragged_prefill": {"qo_indptr": [0, 1], "kv_indptr": [0, 1], "tensors": q | kv},
        "cascade": {"layer": 0, "levels": [chat | {"qo_indptr": [0, 1]}], "tensors": q},
        "merge": {"tensors": {"o": o, "lse": lse}},
        "match_prefix": {"token_ids": tokens},
        "commit": {"token_ids": [], "priority": 80, "duration_s": 600.0},
        "evict": {"num_pages": 1},
        "clear": {},
        "set_namespace": {"max_pages": None, "reserved_pages": 0},
        "delete_sequences": {"ids": [DELETED]},
        "export_sequence": {},
        "drain_engine": {"stop": True},
        "truncate_sequences": chat | {"lengths": [0]},
        "commit_sequences": chat | {"token_ids": [], "names_indptr": [0, 0]},
        "prefetch": {"token_ids": tokens, "max_load_pages": 64},
        "contains_records": block,
        "put_records": block | {"tensors": block["tensors"] | stored},
        "get_records": block,
        "touch_records": block,
        "delete_records": block,
        "clear_records": {},
    }


def tensor(dtype: str, data: list[int]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [len(data)], "data": data}
