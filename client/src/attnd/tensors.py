"""Bodies of tensor routes: safetensors, with the fields as one JSON object in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

Array = NDArray[Any]

MEDIA_TYPE: Final = "application/vnd.safetensors"

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What may travel, by safetensors' name; all little-endian."""


def encode(fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> bytes:
    """A request body: `fields` as JSON under the metadata key `request`, and named tensors.

    Raises TypeError for a dtype that cannot travel.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise TypeError(
                f"{name} has dtype {tensor.dtype}: it must be one of {', '.join(DTYPES)}"
            )
    dense = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    metadata = {"request": json.dumps(fields, separators=(",", ":"))}
    return safetensors.numpy.save(dense, metadata)


def decode(body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields under `response` and the tensors (writable, the caller's own) of a reply.

    Raises ValueError when the body is not that.
    """
    try:
        tensors = {
            name: np.frombuffer(view["data"], dtype=DTYPES[view["dtype"]]).reshape(view["shape"])
            for name, view in safetensors.deserialize(body)  # type: ignore[no-untyped-call]
        }
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"not a safetensors body: {error}") from error
    # The library checks the header and hands out the tensors, but not the metadata.
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    fields = json.loads(header.get("__metadata__", {}).get("response", "null"))
    if not isinstance(fields, dict):
        raise ValueError("the safetensors metadata has no JSON object under `response`")
    return fields, tensors
