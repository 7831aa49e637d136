"""The protocol's messages and methods, from the descriptors of `open_inference.proto`.

They have a descriptor pool of their own, so that a client of the same protocol can be imported into
the door's process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.errors import MalformedBody

DESCRIPTORS: Final = Path(__file__).with_name("open_inference.binpb")
POOL: Final = DescriptorPool()
for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
    POOL.Add(file)
SERVICE: Final = POOL.FindServiceByName("inference.GRPCInferenceService")


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def decoder(name: str) -> Callable[[bytes], Any]:
    """A function that reads a message of that name, and raises MalformedBody."""
    read = message(name).FromString

    def decode(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            raise MalformedBody(f"not a message {name}: {error}") from None

    return decode


ModelInferResponse: Final = message("ModelInferResponse")
ModelStreamInferResponse: Final = message("ModelStreamInferResponse")
read_infer_request: Final = decoder("ModelInferRequest")
