"""Explicit cascades and merges on the CPU backend, whole and in slices, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

from tests.engine.harness import Caller, NewCall, Reply, fake_engine, queries
from tests.engine.pool_model import CPU_GEOMETRY, Model, close, cpu_engine, indptr


def level(names: list[str], *lens: int) -> dict[str, Any]:
    return {"sequences": names, "qo_indptr": indptr(*lens)}


async def three_levels(model: Model) -> NewCall:
    """The documents' figure: eight queries below one, two and eight stretches of KV."""
    for name, length in (("l0", 13), ("l1a", 6), ("l1b", 10)):
        await model.create(name)
        await model.append(name, length)
    for b in range(8):
        await model.create(f"q{b}")
        await model.append(f"q{b}", b)
    levels = [
        level(["l0"], 8),
        level(["l1a", "l1b"], 3, 5),
        level([f"q{b}" for b in range(8)], *[1] * 8),
    ]
    fields = {"layer": 0, "levels": levels, "causal": True}
    return NewCall("cascade", fields, {"q": queries(7, 8, CPU_GEOMETRY)})


def below(model: Model, one: dict[str, Any], call: NewCall, causal: bool = False) -> Any:
    """The oracle's state of one level."""
    q = call.tensors["q"]
    return model.expected(one["sequences"], 0, q, one["qo_indptr"], causal=causal)


def states(reply: Reply, count: int) -> list[tuple[Any, Any]]:
    """Each level's own state."""
    assert len(reply.tensors) == 2 + 2 * count
    return [(reply.tensors[f"o.{at}"], reply.tensors[f"lse.{at}"]) for at in range(count)]


@cpu_engine()
async def test_an_explicit_cascade_equals_the_oracle_and_its_levels_merge_to_the_whole(
    caller: Caller, slice_ms: float
) -> None:
    model = Model(caller)
    call = await three_levels(model)
    parts = [below(model, one, call) for one in call.fields["levels"]]
    wanted = oracle.merge(parts)
    whole = await caller.submit(call)
    close(whole, wanted)
    assert (whole.fields["levels"], whole.fields["cascade"]) == (3, True)
    assert set(whole.tensors) == {"o", "lse"}
    reply = await caller.submit(call.but(return_levels=True))
    close(reply, wanted, "with levels")
    for at, (state, part) in enumerate(zip(states(reply, 3), parts, strict=True)):
        close(state, part, f"level {at}")


@cpu_engine()
async def test_rows_that_a_level_leaves_out_attend_nothing_there(
    caller: Caller, slice_ms: float
) -> None:
    model = Model(caller)
    call = await three_levels(model)
    first = call.fields["levels"][0]
    for some in ([0, 3], [2, 5], [5, 8]):
        part = {"sequences": ["l1a"], "qo_indptr": some}
        reply = await caller.submit(call.but(levels=[first, part], return_levels=True))
        o, lse = states(reply, 2)[1]
        out = np.r_[0 : some[0], some[1] : 8]
        assert (o[out] == 0).all()
        assert (lse[out] == -np.inf).all()
        wanted = below(model, first, call)
        np.testing.assert_allclose(reply.lse[out], wanted[1][out], atol=1e-5, rtol=0)
        inside = slice(*some)
        q = call.tensors["q"][inside]
        own = model.expected(["l1a"], 0, q, [0, len(q)], causal=True)
        close((o[inside], lse[inside]), own, str(some))


@cpu_engine()
async def test_only_the_last_level_of_a_cascade_is_causal(caller: Caller, slice_ms: float) -> None:
    model = Model(caller)
    call = await three_levels(model)
    levels = [level(["l0"], 8), level(["q7", "q5"], 5, 3)]
    for causal in (False, True):
        reply = await caller.submit(call.but(levels=levels, causal=causal))
        parts = [below(model, levels[0], call), below(model, levels[1], call, causal)]
        close(reply, oracle.merge(parts), f"causal {causal}")


@cpu_engine()
async def test_levels_that_share_pages_for_the_same_row_are_refused(caller: Caller) -> None:
    model = Model(caller)
    await model.create("a")
    await model.append("a", 12)
    await model.create("b", "a")
    fields = {"layer": 0, "levels": [level(["a"], 1), level(["b"], 1)]}
    call = NewCall("cascade", fields, {"q": queries(0, 1, CPU_GEOMETRY)})
    await caller.refused(call, "invalid_request", field="levels")


@cpu_engine()
async def test_base_two_comes_out_and_goes_in(caller: Caller, slice_ms: float) -> None:
    call = await three_levels(Model(caller))
    natural = await caller.submit(call.but(return_levels=True))
    binary = await caller.submit(call.but(return_levels=True, lse_base="2"))
    assert (binary.fields["lse_base"], natural.fields["lse_base"]) == ("2", "e")
    np.testing.assert_allclose(binary.lse, natural.lse / np.log(2), rtol=1e-6)
    np.testing.assert_allclose(
        states(binary, 3)[2][1], states(natural, 3)[2][1] / np.log(2), rtol=1e-6
    )
    for reply in (natural, binary):
        base = reply.fields["lse_base"]
        o, lse = (np.stack([one[part] for one in states(reply, 3)], axis=1) for part in (0, 1))
        flat = {"o": o.reshape(24, 4, 16), "lse": lse.reshape(24, 4)}
        ragged = {"lse_base": base, "indptr": list(range(0, 25, 3))}
        for fields, tensors in ((ragged, flat), ({"lse_base": base}, {"o": o, "lse": lse})):
            merged = await caller.call("merge", fields, **tensors)
            np.testing.assert_allclose(merged.o, natural.o, atol=1e-5)
            np.testing.assert_allclose(merged.lse, reply.lse, atol=1e-5)
            assert merged.fields == {"lse_base": base}


@pytest.mark.parametrize(("lists", "members"), [(0, 3), (2, 0), (0, 0)])
@cpu_engine()
async def test_a_merge_of_no_states_is_empty(
    caller: Caller, slice_ms: float, lists: int, members: int
) -> None:
    o, lse = np.ones((lists, members, 4, 16), np.float32), np.ones((lists, members, 4), np.float32)
    merged = await caller.call("merge", {}, o=o, lse=lse)
    assert np.array_equal(merged.o, np.zeros((lists, 4, 16)))
    assert np.array_equal(merged.lse, np.full((lists, 4), -np.inf))


@fake_engine()
async def test_a_cascade_of_one_level_with_its_states_is_that_level(caller: Caller) -> None:
    await caller.create("a")
    fields = {"layer": 0, "levels": [level(["a"], 2)], "return_levels": True}
    reply = await caller.call("cascade", fields, q=queries(0, 2))
    assert (reply.o == 0).all()
    assert (reply.tensors["lse.0"] == -np.inf).all()
