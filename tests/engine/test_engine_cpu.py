"""The engine on the CPU backend against the dense oracle, and one way of asking against another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import oracle
import pytest
from engine_fakes import outcome, pool, queries, rows, until, with_engine

from kernels import make_backend
from kernels.backend import DType, Layout, PoolGeometry
from service.core.errors import InvalidRequest
from service.engine import operations as ops
from service.engine.engine import Engine

GEOMETRY = PoolGeometry(2, 96, 5, 2, 16, dtype="fp32")
SCALE = GEOMETRY.head_dim**-0.5
Array = Any


@dataclass
class Model:
    """What the pool should hold: K and V of every sequence at every layer, as plain arrays."""

    engine: Engine
    held: dict[tuple[str, int], tuple[Array, Array]] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    async def create(self, name: str, parent: str | None = None, length: int | None = None) -> None:
        await self.engine.submit(ops.CreateSequences((ops.NewSequence(name, parent, length),)))
        for layer in range(GEOMETRY.num_layers):
            k, v = self.held[parent, layer] if parent else (rows(0, 0, GEOMETRY),) * 2
            self.held[name, layer] = (k[:length], v[:length])

    def grow(self, names: tuple[str, ...], lens: list[int], layer: int) -> tuple[Array, Array]:
        """k and v to append, taken as appended."""
        seed = next(self.seeds)
        k, v = (rows(2 * seed + part, sum(lens), GEOMETRY) for part in (0, 1))
        begin = 0
        for name, count in zip(names, lens, strict=True):
            held = self.held[name, layer]
            new = (k[begin : begin + count], v[begin : begin + count])
            self.held[name, layer] = tuple(
                np.concatenate(pair) for pair in zip(held, new, strict=True)
            )
            begin += count
        return k, v

    async def append(self, name: str, count: int) -> None:
        for layer in range(GEOMETRY.num_layers):
            k, v = self.grow((name,), [count], layer)
            await self.engine.submit(ops.Append(layer, (name,), indptr(count), None, k, v))

    def expected(self, names: tuple[str, ...], layer: int, q: Array, at: Array, **how: Any) -> Any:
        """The oracle's o and lse, for rows `at` of q over each sequence."""
        states = []
        for b, name in enumerate(names):
            k, v = self.held[name, layer]
            mine = q[at[b] : at[b + 1]]
            seen = oracle.visible(len(mine), len(k), **how)
            states.append(oracle.attend(mine, k, v, seen, sm_scale=SCALE))
        return tuple(np.concatenate(part) for part in zip(*states, strict=True))


def indptr(*lens: int) -> Array:
    return np.cumsum([0, *lens]).astype(np.int32)


def prefill(names: tuple[str, ...], lens: list[int], seed: int, **fields: Any) -> ops.Attention:
    fields = {"causal": True, "options": ops.Options(), "layer": 0} | fields
    q = queries(seed, sum(lens), GEOMETRY)
    return ops.Attention(name="prefill", sequences=names, qo_indptr=indptr(*lens), q=q, **fields)


def decode(names: tuple[str, ...], seed: int, **fields: Any) -> ops.Attention:
    return replace(prefill(names, [1] * len(names), seed, **fields), name="decode")


async def attended(engine: Engine, operation: ops.Operation) -> ops.Attended:
    answer = (await engine.submit(operation)).answer
    assert isinstance(answer, ops.Attended)
    return answer


def close(told: ops.Attended, wanted: tuple[Array, Array], case: str = "") -> None:
    np.testing.assert_allclose(told.o, wanted[0], atol=1e-5, rtol=0, err_msg=f"o {case}")
    np.testing.assert_allclose(told.lse, wanted[1], atol=1e-5, rtol=0, err_msg=f"lse {case}")


def on_cpu(scenario: Any, geometry: PoolGeometry = GEOMETRY) -> None:
    with_engine(make_backend("cpu", geometry, poison=True), scenario)


async def family(model: Model) -> tuple[str, ...]:
    """Eight sequences below a trunk of 12 and two branches, one more that shares nothing."""
    await model.create("trunk")
    await model.append("trunk", 12)
    for branch in ("x", "y"):
        await model.create(branch, "trunk")
        await model.append(branch, 11)
        for leaf in range(3):
            await model.create(f"{branch}{leaf}", branch, 23 - leaf)
            await model.append(f"{branch}{leaf}", 1 + leaf)
    await model.create("lone")
    await model.append("lone", 7)
    await model.create("empty")
    return ("x0", "y1", "x1", "lone", "y0", "x2", "empty", "y2", "x", "trunk")


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_fork_then_decode_equals_the_oracle_however_it_runs(mode: ops.CascadeMode) -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        names = await family(model)
        options = ops.Options(cascade=mode)
        for step in range(3):
            for layer in range(GEOMETRY.num_layers):
                k, v = model.grow(names, [1] * len(names), layer)
                operation = decode(names, step, layer=layer, options=options, k=k, v=v)
                told = await attended(engine, operation)
                one_each = indptr(*[1] * len(names))
                wanted = model.expected(names, layer, operation.q, one_each)
                close(told, wanted, f"step {step}, layer {layer}")
            assert told.cascade == (told.levels > 1)
            if mode != "auto":
                assert told.cascade == (mode == "always")

    on_cpu(scenario)


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window_left": 6}])
def test_prefill_over_forks_equals_the_oracle(mode: ops.CascadeMode, how: dict[str, Any]) -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        names = await family(model)
        lens = [3, 1, 0, 9, 2, 5, 2, 1, 4, 6]
        k, v = model.grow(names, lens, 1)
        options = ops.Options(cascade=mode, window_left=how.get("window_left", -1))
        operation = prefill(
            names, lens, 5, layer=1, k=k, v=v, causal=how.get("causal", False), options=options
        )
        told = await attended(engine, operation)
        close(told, model.expected(names, 1, operation.q, operation.qo_indptr, **how))

    on_cpu(scenario)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_both_forms_reach_the_right_rows(
    packed: bool, mode: ops.CascadeMode, causal: bool
) -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        names = await family(model)
        lens = [3, 1, 0, 5, 2, 1, 2, 1, 4, 6]
        rng = np.random.default_rng(3)
        masks = [
            rng.random((n, model.held[name, 0][0].shape[0])) < 0.5
            for n, name in zip(lens, names, strict=True)
        ]
        if packed:
            flat = np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
        else:
            flat = np.concatenate([mask.reshape(-1) for mask in masks])
        options = ops.Options(cascade=mode)
        operation = prefill(
            names, lens, 5, causal=causal, options=options, mask=flat, mask_packed=packed
        )
        told = await attended(engine, operation)
        begin = operation.qo_indptr
        for b, name in enumerate(names):
            mine = slice(begin[b], begin[b + 1])
            k, v = model.held[name, 0]
            seen = oracle.visible(lens[b], len(k), causal=causal, mask=masks[b])
            o, lse = oracle.attend(operation.q[mine], k, v, seen, sm_scale=SCALE)
            close(replace(told, o=told.o[mine], lse=told.lse[mine]), (o, lse), name)
        short = replace(operation, mask=flat[:-1])
        told_wrong = await outcome(engine.submit(short))
        assert isinstance(told_wrong, InvalidRequest)
        assert told_wrong.field == ("packed_mask" if packed else "mask")
        assert str(flat.size) in told_wrong.rule

    on_cpu(scenario)


def test_two_interleaved_clients_get_the_numbers_they_get_alone() -> None:
    async def client(engine: Engine, name: str, seed: int) -> list[ops.Attended]:
        model = Model(engine, seeds=iter(range(seed, seed + 10**6)))
        await model.create(name)
        await model.append(name, 17)
        await model.create(f"{name}-fork", name, 9)
        told = []
        for step in range(6):
            names = (name, f"{name}-fork")
            for layer in range(GEOMETRY.num_layers):
                k, v = model.grow(names, [1, 1], layer)
                told.append(await attended(engine, decode(names, step, layer=layer, k=k, v=v)))
        return told

    async def together(engine: Engine) -> list[list[ops.Attended]]:
        return await asyncio.gather(*(client(engine, f"c{at}", 100 * at) for at in range(4)))

    shared = with_engine(make_backend("cpu", GEOMETRY), together)
    for at in range(4):
        alone = with_engine(
            make_backend("cpu", GEOMETRY), lambda engine, at=at: client(engine, f"c{at}", 100 * at)
        )
        for one, other in zip(alone, shared[at], strict=True):
            np.testing.assert_allclose(one.o, other.o, atol=1e-6, rtol=0, err_msg=f"client {at}")
            np.testing.assert_allclose(one.lse, other.lse, atol=1e-6, rtol=0)


def test_attention_that_shares_a_launch_has_the_numbers_it_has_alone() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        names = await family(model)
        every = [
            decode(names[:4], 1),
            prefill(names[2:5], [2, 3, 1], 2, layer=1),
            decode(names, 3, layer=1, options=ops.Options(cascade="always")),
            prefill(("x",), [4], 4, causal=False),
        ]
        alone = [await attended(engine, each) for each in every]
        together = await asyncio.gather(*(attended(engine, each) for each in every))
        for at, (one, other) in enumerate(zip(alone, together, strict=True)):
            np.testing.assert_allclose(one.o, other.o, atol=1e-6, rtol=0, err_msg=str(at))
            np.testing.assert_allclose(one.lse, other.lse, atol=1e-6, rtol=0, err_msg=str(at))

    on_cpu(scenario)


async def three_levels(model: Model) -> ops.Cascade:
    """The documents' figure: eight queries below one, two and eight stretches of KV."""
    for name, length in (("l0", 13), ("l1a", 6), ("l1b", 10)):
        await model.create(name)
        await model.append(name, length)
    for b in range(8):
        await model.create(f"q{b}")
        await model.append(f"q{b}", b)
    levels = (
        ops.CascadeLevel(("l0",), indptr(8)),
        ops.CascadeLevel(("l1a", "l1b"), indptr(3, 5)),
        ops.CascadeLevel(tuple(f"q{b}" for b in range(8)), indptr(*[1] * 8)),
    )
    return ops.Cascade(0, levels, queries(7, 8, GEOMETRY), True, False, ops.Options())


def below(model: Model, level: ops.CascadeLevel, q: Array, causal: bool = False) -> Any:
    return model.expected(level.sequences, 0, q, level.qo_indptr, causal=causal)


def test_an_explicit_cascade_equals_the_oracle_and_its_levels_merge_to_the_whole() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        operation = await three_levels(model)
        parts = [below(model, level, operation.q) for level in operation.levels]
        wanted = oracle.merge(parts)
        whole = await attended(engine, operation)
        close(whole, wanted)
        assert (whole.levels, whole.cascade, whole.level_states) == (3, True, ())
        told = await attended(engine, replace(operation, return_levels=True))
        close(told, wanted, "with levels")
        assert len(told.level_states) == 3
        for at, (state, part) in enumerate(zip(told.level_states, parts, strict=True)):
            close(replace(told, o=state[0], lse=state[1]), part, f"level {at}")

    on_cpu(scenario)


def test_rows_that_a_level_leaves_out_attend_nothing_there() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        operation = await three_levels(model)
        some = ops.CascadeLevel(("l1a",), indptr(3))  # rows 3 to 7 are not in it
        levels = (operation.levels[0], some)
        told = await attended(engine, replace(operation, levels=levels, return_levels=True))
        o, lse = told.level_states[1]
        assert (o[3:] == 0).all()
        assert (lse[3:] == -np.inf).all()
        first = below(model, levels[0], operation.q)
        np.testing.assert_allclose(told.lse[3:], first[1][3:], atol=1e-5, rtol=0)

    on_cpu(scenario)


def test_only_the_last_level_of_a_cascade_is_causal() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        operation = await three_levels(model)
        levels = (
            ops.CascadeLevel(("l0",), indptr(8)),
            ops.CascadeLevel(("q7", "q5"), indptr(5, 3)),
        )
        for causal in (False, True):
            told = await attended(engine, replace(operation, levels=levels, causal=causal))
            parts = [
                below(model, levels[0], operation.q),
                below(model, levels[1], operation.q, causal),
            ]
            close(told, oracle.merge(parts), f"causal {causal}")

    on_cpu(scenario)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (ops.Options(window_left=3), "window_left"),
        (ops.Options(cascade="always"), "cascade"),
        (ops.Options(cascade="never"), "cascade"),
    ],
)
def test_options_that_an_explicit_cascade_does_not_apply_are_refused(
    options: ops.Options, name: str
) -> None:
    async def scenario(engine: Engine) -> None:
        operation = await three_levels(Model(engine))
        told = await outcome(engine.submit(replace(operation, options=options)))
        assert isinstance(told, InvalidRequest)
        assert told.field == name

    on_cpu(scenario)


def test_levels_that_share_pages_for_the_same_row_are_refused() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        await model.create("a")
        await model.append("a", 12)
        await model.create("b", "a")
        levels = (ops.CascadeLevel(("a",), indptr(1)), ops.CascadeLevel(("b",), indptr(1)))
        q = queries(0, 1, GEOMETRY)
        told = await outcome(engine.submit(ops.Cascade(0, levels, q, False, False, ops.Options())))
        assert isinstance(told, InvalidRequest)
        assert told.field == "levels"

    on_cpu(scenario)


def test_base_two_comes_out_and_goes_in() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        operation = await three_levels(model)
        two = ops.Options(lse_base="2")
        natural = await attended(engine, replace(operation, return_levels=True))
        binary = await attended(engine, replace(operation, return_levels=True, options=two))
        assert (binary.lse_base, natural.lse_base) == ("2", "e")
        np.testing.assert_allclose(binary.lse, natural.lse / np.log(2), rtol=1e-6)
        np.testing.assert_allclose(
            binary.level_states[2][1], natural.level_states[2][1] / np.log(2), rtol=1e-6
        )
        at = np.arange(0, 25, 3, dtype=np.int32)
        for told in (natural, binary):
            o, lse = (
                np.stack([state[part] for state in told.level_states], axis=1) for part in (0, 1)
            )
            merged = await attended(
                engine,
                ops.Merge(o.reshape(24, 4, 16), lse.reshape(24, 4), at, told.lse_base),
            )
            np.testing.assert_allclose(merged.o, natural.o, atol=1e-5)
            np.testing.assert_allclose(merged.lse, told.lse, atol=1e-5)
            assert merged.lse_base == told.lse_base

    on_cpu(scenario)


def test_ragged_prefill_equals_the_oracle_touches_no_page_and_refuses_cascade() -> None:
    async def scenario(engine: Engine) -> None:
        before = await pool(engine)
        lens, kv_lens = [3, 0, 2], [5, 4, 0]
        q, k, v = queries(1, 5, GEOMETRY), rows(1, 9, GEOMETRY), rows(2, 9, GEOMETRY)
        mask = np.random.default_rng(0).random(15) < 0.5
        operation = ops.RaggedPrefill(
            q, k, v, indptr(*lens), indptr(*kv_lens), False, ops.Options(), mask
        )
        told = await attended(engine, operation)
        seen = oracle.visible(3, 5, mask=mask)
        o, lse = oracle.attend(q[:3], k[:5], v[:5], seen, sm_scale=SCALE)
        close(replace(told, o=told.o[:3], lse=told.lse[:3]), (o, lse))
        assert (told.o[3:] == 0).all()
        assert (told.lse[3:] == -np.inf).all()
        assert await pool(engine) == before
        for wrong, name in (
            (replace(operation, options=ops.Options(cascade="always")), "cascade"),
            (replace(operation, mask=mask[1:]), "mask"),
        ):
            refused = await outcome(engine.submit(wrong))
            assert isinstance(refused, InvalidRequest)
            assert refused.field == name

    on_cpu(scenario)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("fp32", 1.0), ("fp16", 1.0), ("bf16", 1.0), ("fp8_e4m3", 0.3), ("fp8_e5m2", 2.5)],
)
def test_the_self_test_passes_on_every_pool_and_gather_reads_what_was_appended(
    dtype: DType, scale: float, layout: Layout
) -> None:
    geometry = replace(GEOMETRY, dtype=dtype, layout=layout, k_scale=scale, v_scale=scale)

    async def scenario(engine: Engine) -> None:
        assert (engine.state, engine.reason) == ("ready", "ready")
        info = await pool(engine)
        assert (info.free, info.sequences, info.integrity) == (96, 0, "ok")
        k, v = rows(1, 12, geometry), rows(2, 12, geometry)
        await engine.submit(ops.CreateSequences((ops.NewSequence("a"), ops.NewSequence("b"))))
        await engine.submit(ops.Append(0, ("a", "b"), indptr(7, 5), None, k, v))
        told = (await engine.submit(ops.Gather(0, ("b", "a"), "fp32"))).answer
        assert isinstance(told, ops.Gathered)
        assert told.kv_indptr.tolist() == [0, 5, 12]
        rounding = {"fp32": 0.0, "fp16": 1e-3, "bf16": 1e-2, "fp8_e4m3": 0.07, "fp8_e5m2": 0.13}
        for got, given in ((told.k, k), (told.v, v)):
            wanted = np.concatenate((given[7:], given[:7]))
            bar = rounding[dtype] * np.abs(wanted) + (scale * 2e-2 if scale != 1.0 else 0.0)
            assert (np.abs(got - wanted) <= bar).all()

    on_cpu(scenario, geometry)


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_the_self_test_fits_the_smallest_pools(num_pages: int, page_size: int) -> None:
    async def scenario(engine: Engine) -> None:
        assert engine.state == "ready", engine.reason
        assert (await pool(engine)).free == num_pages

    on_cpu(scenario, replace(GEOMETRY, num_pages=num_pages, page_size=page_size))


def test_a_backend_that_computes_wrongly_never_becomes_ready() -> None:
    class Wrong:
        """The CPU backend, with one number of every output off by a tenth."""

        def __init__(self) -> None:
            self.inner = make_backend("cpu", GEOMETRY)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def attend(self, requests: Any) -> Any:
            pending = self.inner.attend(requests)
            for state in pending.value:
                state.o[-1, -1, -1] += 0.1
            return pending

    async def scenario(engine: Engine) -> None:
        await until(lambda: engine.state == "lost")
        assert "the self-test failed: prefill: o[7, 3, 15] is" in engine.reason
        assert "must be" in engine.reason

    with_engine(Wrong(), scenario)


def test_the_page_table_shows_every_level_of_the_tree() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        names = await family(model)
        told = (await engine.submit(ops.PageTable(names, 0))).answer
        assert isinstance(told, ops.PageTableInfo)
        assert len(told.levels) == 3
        assert sorted(told.order.tolist()) == list(range(len(names)))
        for row, at in enumerate(told.order.tolist()):
            pages: list[int] = []
            for level in told.levels:
                segment = int(np.searchsorted(level.qo_indptr, row, "right")) - 1
                begin, end = level.kv_indptr[segment : segment + 2]
                pages += level.kv_indices[begin:end].tolist()
            begin, end = told.kv_indptr[at : at + 2]
            assert pages == told.kv_indices[begin:end].tolist(), names[at]

    on_cpu(scenario)


def test_sequences_are_made_with_ids_of_their_own_listed_cut_and_deleted() -> None:
    async def scenario(engine: Engine) -> None:
        new = ops.CreateSequences((ops.NewSequence(), ops.NewSequence("b"), ops.NewSequence()))
        made = (await engine.submit(new)).answer
        assert isinstance(made, tuple)
        names = [info.id for info in made]
        assert len(set(names)) == 3
        assert names[0].startswith("seq-")
        model = Model(engine, {("b", layer): (rows(0, 0, GEOMETRY),) * 2 for layer in (0, 1)})
        await model.append("b", 9)
        listed = (await engine.submit(ops.ListSequences(None, 2))).answer
        assert isinstance(listed, tuple)
        assert [info.id for info in listed] == sorted(names)[:2]
        cut = (await engine.submit(ops.Truncate("b", 6))).answer
        assert cut == ops.SequenceInfo("b", 6, (6, 6), 2, 1, None)
        for name in names:
            assert (await engine.submit(ops.DeleteSequence(name))).answer is None
        assert (await pool(engine)).free == GEOMETRY.num_pages

    on_cpu(scenario)


def test_what_was_read_and_what_sharing_saved_is_counted_in_bytes() -> None:
    async def scenario(engine: Engine) -> None:
        model = Model(engine)
        await model.create("a")
        await model.append("a", 40)
        await model.create("b", "a")
        await model.append("b", 2)
        always, never = ops.Options(cascade="always"), ops.Options(cascade="never")
        await attended(engine, decode(("a", "b"), 0, options=never))
        await attended(engine, decode(("a", "b"), 0, options=always))
        text = engine._metrics.render()[0].decode()
        token = GEOMETRY.token_bytes
        assert f"attnd_kv_bytes_read_total {(82 + 42) * token:.1f}" in text
        assert f"attnd_kv_bytes_saved_total {40 * token:.1f}" in text
        assert 'attnd_cascade_batches_total{mode="cascade"} 1.0' in text
        assert 'attnd_cascade_batches_total{mode="flat"} 1.0' in text
        assert "attnd_tokens_appended_total 84.0" in text

    on_cpu(scenario)
