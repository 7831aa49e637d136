"""Exports for tests of the engine: taken whole, and brought part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.backend import PoolGeometry
from tests.engine.harness import Caller, NewCall, Reply, rows


@dataclass(frozen=True)
class Exported:
    """A header with its digest and names, and every part with its digest."""

    header: dict[str, Any]
    digest: str
    names: dict[str, Any]
    parts: list[tuple[str, dict[str, Any]]]
    whole: list[int] | None = None

    @property
    def last(self) -> str:
        return self.parts[-1][0] if self.parts else self.digest

    def begin(self, name: str, **fields: Any) -> NewCall:
        given = {"id": name, "header": self.header, "digest": self.digest} | fields
        return NewCall("import_sequence", given, self.names)

    def part(self, name: str, number: int, **fields: Any) -> NewCall:
        digest, tensors = self.parts[number]
        given = {"id": name, "part": number, "digest": digest} | fields
        return NewCall("import_sequence", given, tensors)

    def end(self, name: str, **fields: Any) -> NewCall:
        return NewCall("import_sequence", {"id": name, "digest": self.last} | fields)


async def export(caller: Caller, name: str, **fields: Any) -> Exported:
    reply = await caller.call("export_sequence", {"id": name} | fields)
    header, digest, parts = reply.fields["header"], reply.fields["digest"], []
    before = digest
    for number in range(header["num_parts"]):
        part = await ask_part(caller, name, header, number, before)
        before = part.fields["digest"]
        parts.append((before, dict(part.tensors)))
    return Exported(header, digest, dict(reply.tensors), parts)


async def ask_part(
    caller: Caller,
    name: str,
    header: dict[str, Any],
    number: int,
    before: str,
) -> Reply:
    fields: dict[str, Any] = {"id": name, "part": number, "before": before}
    fields |= {key: header[key] for key in ("generation", "part_bytes")}
    return await caller.submit(NewCall("export_sequence", fields), room=2**20)


async def bring(caller: Caller, given: Exported, name: str, **fields: Any) -> dict[str, Any]:
    """Import an export whole; what its beginning reply."""
    reply = (await caller.submit(given.begin(name, **fields))).fields
    for number in range(reply["next_part"], reply["num_parts"]):
        before = {"before": given.parts[number - 1][0]} if number else {}
        await caller.submit(given.part(name, number, **before))
    await caller.submit(given.end(name))
    return reply


async def grow(
    caller: Caller, name: str, lengths: Sequence[int], geometry: PoolGeometry, seed: int = 0
) -> None:
    """Append to a sequence the given number of rows at each layer."""
    for layer, count in enumerate(lengths):
        fields = {"layer": layer, "sequences": [name], "append_indptr": [0, count]}
        k, v = (rows(seed + 2 * layer + half, count, geometry) for half in (0, 1))
        await caller.call("append", fields, k=k, v=v)


async def held(caller: Caller, name: str, num_layers: int) -> list[Any]:
    """K and V of a sequence at every layer, as float32."""
    every = []
    for layer in range(num_layers):
        fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
        reply = await caller.submit(NewCall("gather", fields), room=2**20)
        every += [np.array(reply.tensors["k"]), np.array(reply.tensors["v"])]
    return every


async def same(caller: Caller, one: str, other: str, num_layers: int) -> bool:
    """Whether two sequences hold the same, to the bit."""
    pairs = zip(
        await held(caller, one, num_layers), await held(caller, other, num_layers), strict=True
    )
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)
