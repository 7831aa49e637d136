"""Shared memory as the tests' clients have it, through `tritonclient.utils.shared_memory`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from triton_callers import Triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

NUMBERS = count()


def free_key(prefix: str = "") -> str:
    """A name that no object in /dev/shm has."""
    return f"/{prefix}attnd-test-{os.getpid()}-{next(NUMBERS)}"


@dataclass
class Region:
    """A shared memory object, registered or not as `name`."""

    name: str
    key: str
    handle: Any

    @property
    def path(self) -> str:
        return f"/dev/shm{self.key}"

    def put(self, *arrays: Any, offset: int = 0) -> None:
        shm.set_shared_memory_region(self.handle, arrays, offset)

    def get(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
        return np.array(shm.get_contents_as_numpy(self.handle, dtype, shape, offset))

    def all_bytes(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()


@contextmanager
def memory(size: int, prefix: str = "") -> Iterator[Region]:
    """An object of `size` bytes, all 7; nothing of it is left behind."""
    key = free_key(prefix)
    handle = shm.create_shared_memory_region(key, key, size, create_only=True)
    region = Region(key.strip("/"), key, handle)
    region.put(np.full(size, 7, np.uint8))
    try:
        yield region
    finally:
        if not os.path.exists(region.path):  # a test has taken it away: let that be undone
            os.close(os.open(region.path, os.O_CREAT | os.O_RDWR))
        shm.destroy_shared_memory_region(handle)


@contextmanager
def registered(triton: Triton, size: int, prefix: str = "", **how: Any) -> Iterator[Region]:
    with memory(size, prefix) as region:
        triton.client.register_system_shared_memory(region.name, region.key, size, **how)
        try:
            yield region
        finally:
            triton.client.unregister_system_shared_memory(region.name, **how)


def in_region(triton: Triton, name: str, array: Any, region: Region, offset: int = 0) -> Any:
    """An input that lies at an offset of a region."""
    region.put(array, offset=offset)
    made = triton.module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    return made.set_shared_memory(region.name, array.nbytes, offset=offset)


def to_region(triton: Triton, name: str, region: Region, size: int, offset: int = 0) -> Any:
    """An output that is to be written to a region."""
    made = triton.module.InferRequestedOutput(name)
    made.set_shared_memory(region.name, size, offset=offset)
    return made


def packed(triton: Triton, region: Region, arrays: Mapping[str, Any]) -> list[Any]:
    """Inputs that lie one after another in a region."""
    found, at = [], 0
    for name, array in arrays.items():
        found.append(in_region(triton, name, array, region, at))
        at += array.nbytes
    return found


def refusal(call: Any, *given: Any, **how: Any) -> str:
    """What tritonclient says of a refusal: status and message."""
    with pytest.raises(InferenceServerException) as told:
        call(*given, **how)
    return f"{str(told.value.status()).removeprefix('StatusCode.')} {told.value.message()}"


def infer(triton: Triton, model: str, inputs: Any, outputs: Any = None, **fields: Any) -> Any:
    parameters = {
        name: json.dumps(value) if isinstance(value, (list, dict)) else value
        for name, value in fields.items()
    }
    return triton.client.infer(model, inputs, outputs=outputs, parameters=parameters)


def told_of(result: Any, name: str) -> dict[str, Any]:
    """An output's parameters, as the answer has them."""
    output = result.get_output(name)
    if isinstance(output, dict):
        return dict(output["parameters"])
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in output.parameters.items()
    }


def status(triton: Triton, name: str = "") -> dict[str, tuple[str, int, int]]:
    """The regions that are registered: key, offset and size by name."""
    told = triton.client.get_system_shared_memory_status(name)
    if isinstance(told, list):
        return {one["name"]: (one["key"], one["offset"], one["byte_size"]) for one in told}
    return {name: (one.key, one.offset, one.byte_size) for name, one in told.regions.items()}
