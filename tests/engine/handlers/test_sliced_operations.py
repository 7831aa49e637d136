"""Every operation that can be long is cut into slices, and answers as if it had not been."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kernels.cpu.backend import CpuBackend
from service.engine.work.pace import RATES
from tests.engine.harness import Caller, NewCall, Reply, append, gather, queries, rows, until
from tests.engine.pool_model import CPU_GEOMETRY, Model, decode, indptr, on_cpu, prefill

RNG = np.random.default_rng(5)
K, V = rows(21, 12, CPU_GEOMETRY), rows(22, 12, CPU_GEOMETRY)
LEVELS = [
    {"sequences": ["x"], "qo_indptr": [1, 6]},
    {"sequences": ["lone", "empty"], "qo_indptr": [0, 3, 6]},
]
RAGGED = {
    "q": queries(23, 9, CPU_GEOMETRY),
    "k": K,
    "v": V,
    "mask": RNG.random(4 * 5 + 5 * 7) < 0.7,
}
EVERY = {
    "decode": decode(["x0", "y1", "lone"], 1, k=K[:3], v=V[:3]),
    "decode in base 2": decode(["x0", "y1", "lone"], 1, lse_base="2"),
    "prefill": prefill(["x0", "lone", "empty"], [3, 4, 5], 2, k=K, v=V),
    "prefill by cascade": prefill(["x0", "x1", "y0"], [3, 4, 5], 2, cascade="always"),
    "ragged": NewCall("ragged_prefill", {"qo_indptr": [0, 4, 9], "kv_indptr": [0, 5, 12]}, RAGGED),
    "cascade": NewCall(
        "cascade", {"layer": 1, "levels": LEVELS}, {"q": queries(3, 6, CPU_GEOMETRY)}
    ),
    "merge": NewCall(
        "merge",
        {"lse_base": "2"},
        {"o": K.reshape(4, 3, 2, 16), "lse": RNG.random((4, 3, 2), np.float32)},
    ),
    "append": append("empty", 12).but(k=K, v=V),
    "gather": gather("x0", "empty", "lone").but(start=2, stop=20),
    "pool": NewCall("pool"),
}
EVERY["ragged with a window"] = EVERY["ragged"].but(causal=True, window_left=2, lse_base="2")
EVERY["cascade with levels"] = EVERY["cascade"].but(return_levels=True, causal=True)
EVERY["prefill with a window"] = EVERY["prefill"].but(window_left=3, logits_soft_cap=4.0)


async def one(caller: Caller, call: NewCall) -> tuple[Reply, Reply, float]:
    """The answer, the rows of K that it wrote, and the number of slices."""
    await Model(caller).family()
    settled = caller.metric("attnd_slices_total")
    reply = await caller.submit(call)
    await until(lambda: caller.metric("attnd_inflight") == 0)
    slices = caller.metric("attnd_slices_total") - settled
    return reply, await caller.submit(gather("x0", "y1", "lone", "empty")), slices


@pytest.mark.parametrize("name", ["append", "gather", "merge", "ragged"])
def test_an_operation_that_takes_longer_than_it_was_thought_to_is_cut_from_then_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many calls of almost a slice by the estimate would each hold up others for longer."""
    monkeypatch.setitem(RATES, "cpu", (1e6, 1e9))
    method = "attend_ragged" if name == "ragged" else name

    async def scenario(caller: Caller) -> float:
        await Model(caller).family()
        whole = getattr(CpuBackend, method)

        def slow(*given: Any, **named: Any) -> Any:
            time.sleep(0.1)
            return whole(*given, **named)

        monkeypatch.setattr(CpuBackend, method, slow)
        settled = caller.metric("attnd_slices_total")
        for _ in range(3):
            await caller.submit(EVERY[name])
        await until(lambda: caller.metric("attnd_inflight") == 0)
        return caller.metric("attnd_slices_total") - settled

    assert on_cpu(scenario, slice_ms=20.0) > 1


@pytest.mark.parametrize("name", EVERY)
def test_an_operation_in_slices_equals_the_whole_one(name: str) -> None:
    async def scenario(caller: Caller) -> Any:
        return await one(caller, EVERY[name])

    wanted, written, whole = on_cpu(scenario)
    reply, also_written, slices = on_cpu(scenario, slice_ms=1e-6)
    if name != "pool":  # the check of a small pool is one piece, or more if it was interrupted
        assert (whole, slices >= 2) == (0, True), name
    assert (reply.status, reply.fields) == (wanted.status, wanted.fields)
    assert reply.tensors.keys() == wanted.tensors.keys()
    for key, array in wanted.tensors.items():
        assert reply.tensors[key].dtype == array.dtype
        np.testing.assert_allclose(reply.tensors[key], array, atol=2e-6, rtol=2e-6, err_msg=key)
    for key, array in written.tensors.items():
        np.testing.assert_array_equal(also_written.tensors[key], array, err_msg=key)


def test_operations_without_rows_are_answered_in_slices_too() -> None:
    nothing = {"k": K[:0], "v": V[:0]}
    every = [
        prefill(["x0", "empty"], [0, 0], 1),
        prefill(["x0", "empty"], [0, 0], 1, **nothing),
        append("empty", 0).but(**nothing),
        gather("empty"),
        NewCall("ragged_prefill", {"qo_indptr": [0, 0], "kv_indptr": [0, 0]}, nothing).but(
            q=queries(1, 0, CPU_GEOMETRY)
        ),
        NewCall(
            "ragged_prefill", {"qo_indptr": [0, 0], "kv_indptr": [0, 12]}, {"k": K, "v": V}
        ).but(q=queries(1, 0, CPU_GEOMETRY)),
        NewCall("ragged_prefill", {"qo_indptr": [0, 3], "kv_indptr": [0, 0]}, nothing).but(
            q=queries(1, 3, CPU_GEOMETRY)
        ),
        NewCall(
            "merge", {"indptr": indptr(0, 0, 0)}, {"o": K[:0], "lse": np.zeros((0, 2), np.float32)}
        ),
    ]

    async def scenario(caller: Caller) -> None:
        await Model(caller).family()
        for call in every:
            reply = await caller.submit(call)
            if "lse" in reply.tensors:
                assert (reply.lse == -np.inf).all(), call.name

    on_cpu(scenario, slice_ms=1e-9)
    on_cpu(scenario)
