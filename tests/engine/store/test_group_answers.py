"""A pool of three groups of layers, from requests to answers, against the dense oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

from kernels.backend import LayerGroup, PoolGeometry
from tests.engine.harness import Caller, NewCall
from tests.engine.pool_model import close, cpu_engine

GROUPS = (
    LayerGroup((0, 3), 2, 16, 16, 8, "fp32", window=11),
    LayerGroup((1,), 1, 32, 32, 16, "fp32"),
    LayerGroup((2,), 4, 24, 16, 16, "fp32"),
)
GEOMETRY = PoolGeometry.of_groups(GROUPS, 96, "NHD")
LAYERS = range(4)
HEADS = 4


class Sequences:
    """Every sequence's K and V at each layer."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.held: dict[tuple[str, int], tuple[Any, Any]] = {}

    def call(self, name: str, names: list[str], lens: list[int], layer: int) -> NewCall:
        """A decode or prefill with new random rows, which are remembered."""
        group = GEOMETRY.group_of(layer)
        q, k, v = (
            self.rng.standard_normal((sum(lens), *heads), np.float32)
            for heads in (
                (HEADS, group.head_dim),
                (group.num_kv_heads, group.head_dim),
                (group.num_kv_heads, group.v_head_dim),
            )
        )
        ends = np.cumsum([0, *lens]).tolist()
        for at, one in enumerate(names):
            new = k[ends[at] : ends[at + 1]], v[ends[at] : ends[at + 1]]
            before = self.held.get((one, layer), (new[0][:0], new[1][:0]))
            joined = [np.concatenate(both) for both in zip(before, new, strict=True)]
            self.held[one, layer] = joined[0], joined[1]
        fields: dict[str, Any] = {"layer": layer, "sequences": names}
        if name == "prefill":
            fields |= {"qo_indptr": ends, "causal": True}
        return NewCall(name, fields, {"q": q, "k": k, "v": v})

    def expected(self, names: list[str], lens: list[int], layer: int, q: Any) -> Any:
        group, states, begin = GEOMETRY.group_of(layer), [], 0
        for one, rows in zip(names, lens, strict=True):
            k, v = self.held[one, layer]
            window = group.window_left
            seen = oracle.visible(rows, len(k), causal=True, window_left=window)
            part, begin = q[begin : begin + rows], begin + rows
            states.append(oracle.attend(part, k, v, seen, sm_scale=group.head_dim**-0.5))
        return tuple(np.concatenate([state[at] for state in states]) for at in range(2))

    def fork(self, parent: str, child: str, length: int) -> None:
        for layer in LAYERS:
            k, v = self.held[parent, layer]
            self.held[child, layer] = k[:length], v[:length]


async def run(caller: Caller, model: Sequences, name: str, names: list[str], lens: Any) -> None:
    for layer in LAYERS:
        call = model.call(name, names, lens, layer)
        reply = await caller.submit(call)
        wanted = model.expected(names, lens, layer, call.tensors["q"])
        close(reply, wanted, f"{name} of {names} at layer {layer}")


@pytest.mark.parametrize("slice_ms", [1000.0, 1e-6])
@cpu_engine(GEOMETRY)
async def test_every_layer_answers_by_its_group(caller: Caller, rng: Any, slice_ms: float) -> None:
    model = Sequences(rng)
    created = [{"id": "a"}, {"id": "b"}]
    await caller.submit(NewCall("create_sequences", {"sequences": created}))
    await run(caller, model, "prefill", ["a", "b"], [37, 5])
    fork = {"id": "c", "parent": "a", "length": 34}
    await caller.submit(NewCall("create_sequences", {"sequences": [fork]}))
    model.fork("a", "c", 34)
    for _ in range(20):
        await run(caller, model, "decode", ["a", "b", "c"], [1, 1, 1])
    await run(caller, model, "prefill", ["c", "b"], [18, 3])
    for layer in LAYERS:
        fields = {"layer": layer, "sequences": ["c", "a"], "start": 50}
        reply = await caller.submit(NewCall("gather", fields))
        for at, part in enumerate("kv"):
            want = np.concatenate([model.held[one, layer][at][50:] for one in ("c", "a")])
            np.testing.assert_array_equal(reply.tensors[part], want)


@cpu_engine(GEOMETRY)
async def test_an_append_at_the_layers_of_a_group_is_read_by_their_decodes(
    caller: Caller, rng: Any
) -> None:
    model = Sequences(rng)
    await caller.submit(NewCall("create_sequences", {"sequences": [{"id": "a"}]}))
    calls = {layer: model.call("decode", ["a"], [19], layer) for layer in (0, 3)}
    both = {part: np.stack([calls[layer].tensors[part] for layer in (0, 3)]) for part in ("k", "v")}
    fields = {"sequences": ["a"], "layers": [0, 3], "append_indptr": [0, 19]}
    await caller.submit(NewCall("append", fields, both))
    for layer in (0, 3):
        q = calls[layer].tensors["q"][:1]
        call = NewCall("decode", {"layer": layer, "sequences": ["a"]}, {"q": q})
        close(await caller.submit(call), model.expected(["a"], [1], layer, q))


@cpu_engine(GEOMETRY)
async def test_an_export_names_what_it_takes(caller: Caller) -> None:
    await caller.create("a")
    call = NewCall("export_sequence", {"id": "a"})
    await caller.refused(call, "invalid_request", field="pool.groups", value="3 groups")


@cpu_engine(GEOMETRY)
async def test_the_self_test_at_the_start_leaves_no_page(caller: Caller) -> None:
    pool = await caller.pool()
    assert pool["free"] == pool["total"] == 96
