"""The protocol's names of datatypes, by the names in images."""

from __future__ import annotations

from typing import Final

from attnd.wire.dtypes import DTYPES, DType

DATATYPES: Final = {
    "F64": "FP64",
    "F32": "FP32",
    "F16": "FP16",
    "BF16": "BF16",
    "F8_E4M3": "FP8_E4M3",  # the protocol has no FP8: these two names are the project's own
    "F8_E5M2": "FP8_E5M2",
    "I64": "INT64",
    "I32": "INT32",
    "I16": "INT16",
    "I8": "INT8",
    "U64": "UINT64",
    "U32": "UINT32",
    "U16": "UINT16",
    "U8": "UINT8",
    "BOOL": "BOOL",
}
DTYPES_BY_DATATYPE: Final[dict[str, DType]] = {
    datatype: DTYPES[name] for name, datatype in DATATYPES.items()
}
