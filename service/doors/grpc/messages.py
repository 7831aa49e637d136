"""The protocol's messages and methods as Python has them, made from `open_inference.proto`.

They live in a pool of their own, so that a client of the same protocol in one process with the door
does not meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.doors.grpc.proto import read_proto
from service.errors import MalformedBody

PATH: Final = Path(__file__).with_name("open_inference.proto")
POOL: Final = DescriptorPool()
FILE: Final = POOL.AddSerializedFile(
    read_proto(PATH.read_text(encoding="utf-8"), PATH.name).SerializeToString()
)
SERVICE: Final = POOL.FindServiceByName("inference.GRPCInferenceService")


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def decoder(name: str) -> Callable[[bytes], Any]:
    """Reads a message of that name; raises MalformedBody."""
    read = message(name).FromString

    def decode(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            raise MalformedBody(f"no message {name}: {error}") from None

    return decode


ModelInferResponse: Final = message("ModelInferResponse")
ModelStreamInferResponse: Final = message("ModelStreamInferResponse")
read_infer_request: Final = decoder("ModelInferRequest")
