"""Requests of a measurement: decodes and prefills, and sequences filled for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd import NewSequence
from numpy.typing import NDArray

Array = NDArray[Any]
Half = NDArray[np.float16]

ALIGNMENT: Final = 64
FILL_BYTES: Final = 64 * 2**20
"""K and V of one append that fills sequences."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call of an operation: its fields, and its fp16 tensors in the order to send them."""

    operation: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Half]

    @property
    def answer_bytes(self) -> int:
        """Bytes of the answer's o and lse."""
        q = self.tensors["q"]
        return int(q.nbytes + 4 * q.size // q.shape[-1])

    def image(self) -> bytes:
        """The safetensors body, its header padded so that the tensors are aligned in it."""
        from attnd.wire.images import flat, request_header  # older clients lack them

        header = request_header(dict(self.fields), list(self.tensors.items()), ALIGNMENT)
        return b"".join([header, *map(flat, self.tensors.values())])


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and their dimension."""

    num_qo: int
    num_kv: int
    dim: int

    def pool(self, num_layers: int = 1) -> tuple[str, ...]:
        """Options of a service whose pool has these heads."""
        sizes = {"num-kv-heads": self.num_kv, "head-dim": self.dim, "num-layers": num_layers}
        return tuple(word for key, size in sizes.items() for word in (f"--pool.{key}", str(size)))


@dataclass(frozen=True, slots=True)
class Decode:
    """A load: one query row for each of `names`; with `appends`, its k and v are appended first.

    `count` different requests, in turn over `num_layers` layers, of sequences of `kv_len` tokens.
    """

    names: tuple[str, ...]
    heads: Heads
    kv_len: int
    count: int
    num_layers: int = 1
    appends: bool = False

    def requests(self) -> list[Request]:
        heads, rows = self.heads, len(self.names)
        made = []
        for number in range(self.count):
            tensors = {"q": random((rows, heads.num_qo, heads.dim))}
            if self.appends:
                tensors |= {name: random((rows, heads.num_kv, heads.dim)) for name in "kv"}
            fields = {"layer": number % self.num_layers, "sequences": list(self.names)}
            made.append(Request("decode", fields, tensors))
        return made


def random(shape: tuple[int, ...]) -> Half:
    """New unit-normal numbers."""
    return np.random.default_rng().standard_normal(shape, dtype=np.float32).astype(np.float16)


def fill(
    client: Any, batch: int, heads: Heads, kv_len: int, num_layers: int = 1
) -> tuple[str, ...]:
    """`batch` sequences of `kv_len` tokens of random KV in every layer; their ids.

    `client` is an `attnd.Client` or `attnd.Session`; a session's arrays are not copied.
    """
    made: Sequence[Any] = client.create_sequences([NewSequence()] * batch)
    names = tuple(sequence.id for sequence in made)
    token_bytes = 4 * heads.num_kv * heads.dim
    group = max(1, min(batch, FILL_BYTES // (kv_len * token_bytes)))
    shape = (group * kv_len, heads.num_kv, heads.dim)
    if hasattr(client, "empty"):
        k, v = (client.empty(name, shape, np.float16) for name in "kv")
    else:
        k, v = (np.empty(shape, np.float16) for _ in "kv")
    k[...], v[...] = random(shape), random(shape)
    for layer in range(num_layers):
        for first in range(0, batch, group):
            part = names[first : first + group]
            rows = len(part) * kv_len
            indptr = [kv_len * row for row in range(len(part) + 1)]
            client.append(layer, part, k[:rows], v[:rows], append_indptr=indptr)
    return names
