"""Engines that hold shards: their merged states equal the states of whole sequences."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import oracle
import pytest

from kernels import cuda_devices, make_backend
from kernels.backend import NUMPY_DTYPES, PoolGeometry
from kernels.states import merge_states
from tests.engine.harness import Caller, NewCall, Refused, creation, queries, rows, with_engines

GEOMETRIES = {
    "cpu": PoolGeometry(2, 96, 5, 2, 16, dtype="fp32"),
    "cuda": PoolGeometry(2, 96, 16, 2, 64, dtype="fp16"),
}
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_ranks(kind: str, ranks: int, scenario: Any) -> None:
    """Run a scenario with a caller of each of `ranks` engines."""
    if kind == "cuda" and not cuda_devices():
        pytest.skip("no CUDA device")
    backends = [make_backend(kind, GEOMETRIES[kind], poison=True) for _ in range(ranks)]
    with_engines(backends, scenario)


async def create(callers: list[Caller], *names: str) -> None:
    for rank, caller in enumerate(callers):
        shard = {"rank": rank, "ranks": len(callers)}
        new = [{"id": name, "shard": shard} for name in names]
        await caller.submit(creation(*new))


async def ask(callers: list[Caller], name: str, fields: dict[str, Any], **tensors: Any) -> Any:
    """Ask every rank the same; the merged states, if there are any."""
    replies = await asyncio.gather(*(caller.call(name, fields, **tensors) for caller in callers))
    if "o" not in replies[0].tensors:
        return replies
    o, lse = (np.stack([one.tensors[part] for one in replies], 1) for part in ("o", "lse"))
    return merge_states(o, lse)


def check(kind: str, state: Any, k: Any, v: Any, q: Any, case: str, **how: Any) -> None:
    """Against the oracle over the whole sequence."""
    seen = oracle.visible(len(q), len(k), **how)
    o, lse = oracle.attend(q, k, v, seen, sm_scale=GEOMETRIES[kind].head_dim ** -0.5)
    close = 2e-5 if kind == "cpu" else 2e-3
    np.testing.assert_allclose(state.o.astype(np.float64), o, atol=close, err_msg=case)
    np.testing.assert_allclose(state.lse, lse, atol=close, err_msg=case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("window", [-1, 0, 3, "page", "two pages and one"])
def test_merged_states_of_shards_equal_the_whole_sequence_at_every_page_boundary(
    kind: str, ranks: int, window: Any
) -> None:
    geometry = GEOMETRIES[kind]
    size, dtype = geometry.page_size, NUMPY_DTYPES[geometry.dtype]
    window_left = {"page": size, "two pages and one": 2 * size + 1}.get(window, window)
    # tokens of each prefill, with one token of a decode after it: every place in a page is met
    chunks = [0, 1, size - 2, size - 1, size, size + 1, 2 * size - 1, 3 * size + 2]

    async def scenario(callers: list[Caller]) -> None:
        await create(callers, "a")
        total = sum(chunks) + len(chunks)
        k, v = (rows(seed, total, geometry, dtype) for seed in (1, 2))
        length = 0
        for step, count in enumerate(one for chunk in chunks for one in (chunk, 1)):
            at = {"layer": 0, "sequences": ["a"], "offsets": [length], "window_left": window_left}
            new = slice(length, length + count)
            length += count
            q = queries(step, count, geometry, dtype)
            how = {"causal": step % 8 < 6, "window_left": window_left}
            fields = at | {"qo_indptr": [0, count], "causal": how["causal"]}
            state = await ask(callers, "prefill", fields, q=q, k=k[new], v=v[new])
            check(kind, state, k[:length], v[:length], q, f"{length} tokens, {fields}", **how)
            if count == 1:
                q = queries(step, 1, geometry, dtype)
                state = await ask(callers, "decode", at | {"offsets": [length]}, q=q)
                case = f"decode at {length}"
                check(kind, state, k[:length], v[:length], q, case, window_left=window_left)

    on_ranks(kind, ranks, scenario)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_over_whole_sequences_hides_the_same_tokens_at_every_shard(
    kind: str, packed: bool
) -> None:
    geometry = GEOMETRIES[kind]
    dtype = NUMPY_DTYPES[geometry.dtype]

    async def scenario(callers: list[Caller]) -> None:
        await create(callers, "a", "b")
        lens, kept = [23, 9], {}
        for seed, (name, count) in enumerate(zip("ab", lens, strict=True)):
            kept[name] = tuple(rows(2 * seed + part, count, geometry, dtype) for part in (0, 1))
            at = {"layer": 1, "sequences": [name], "append_indptr": [0, count], "offsets": [0]}
            await ask(callers, "append", at, k=kept[name][0], v=kept[name][1])
        rng, counts = np.random.default_rng(5), [4, 3]
        masks = [rng.random((n, m)) < 0.6 for n, m in zip(counts, lens, strict=True)]
        flat = [mask.reshape(-1) for mask in masks]
        packs = [np.packbits(part, bitorder="little") for part in flat]
        given = {"packed_mask": np.concatenate(packs)} if packed else {"mask": np.concatenate(flat)}
        q = queries(9, sum(counts), geometry, dtype)
        how = {"causal": True, "window_left": 11}
        fields = {"layer": 1, "sequences": ["a", "b"], "offsets": lens, "qo_indptr": [0, 4, 7]}
        state = await ask(callers, "prefill", fields | how, q=q, **given)
        begin = 0
        for name, count, mask in zip("ab", counts, masks, strict=True):
            part = slice(begin, begin + count)
            mine = type(state)(state.o[part], state.lse[part])
            check(kind, mine, *kept[name], q[part], name, mask=mask, **how)
            begin += count

    on_ranks(kind, 2, scenario)


def test_a_shard_refuses_unsupported_operations_and_wrong_offsets() -> None:
    geometry = GEOMETRIES["cpu"]

    async def scenario(callers: list[Caller]) -> None:
        (caller,) = callers
        shard = {"rank": 1, "ranks": 3}
        await caller.submit(creation({"id": "a", "shard": shard}))
        new = {"k": rows(1, 12, geometry), "v": rows(2, 12, geometry)}
        fields = {"layer": 0, "sequences": ["a"], "append_indptr": [0, 12]}
        await caller.call("append", fields | {"offsets": [0]}, **new)
        reply = await caller.view("a")
        known = {"epoch": 0, "lengths": [12, 0]}
        assert reply["lengths"] == [5, 0] and reply["shard"] == shard | known
        q = queries(1, 1, geometry)
        decode = {"layer": 0, "sequences": ["a"]}
        level = {"sequences": ["a"], "qo_indptr": [0, 1]}
        refused: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
            ("append", fields, new, "invalid_request"),
            ("append", fields | {"offsets": [4]}, new, "length_mismatch"),
            ("decode", decode, {"q": q}, "invalid_request"),
            ("decode", decode | {"offsets": [9]}, {"q": q}, "length_mismatch"),
            (
                "cascade",
                {"layer": 0, "levels": [level], "causal": True},
                {"q": q},
                "invalid_request",
            ),
            ("export_sequence", {"id": "a"}, {}, "invalid_request"),
            (
                "export_sequence",
                {"id": "a", "shard": {"rank": 0, "ranks": 3}},
                {},
                "invalid_request",
            ),
            ("commit", {"id": "a", "token_ids": list(range(5))}, {}, "invalid_request"),
            (
                "create_sequences",
                {"sequences": [{"parent": "a", "ranks": 2}]},
                {},
                "invalid_request",
            ),
            ("create_sequences", {"sequences": [{"ranks": 2}]}, {}, "invalid_request"),
            (
                "create_sequences",
                {"sequences": [{"shard": {"rank": 3, "ranks": 3}}]},
                {},
                "invalid_request",
            ),
        ]
        for name, call, tensors, code in refused:
            also = {"value": True} if name == "cascade" else {}
            await caller.refused(NewCall(name, call, tensors), code, **also)
        again = await caller.view("a")
        assert again == reply
        exported = (await caller.call("export_sequence", {"id": "a", "shard": shard})).fields
        assert (exported["header"]["lengths"], exported["whole"]) == ([5, 0], [12, 0])
        one_layer = {"id": "a", "layer": 0, "length": 7, "epoch": 1}  # the other layer is empty
        cut = (await caller.call("truncate", one_layer)).fields
        assert (cut["lengths"], cut["shard"]["lengths"]) == ([2, 0], [7, 0])

    on_ranks("cpu", 1, scenario)


def test_a_truncation_of_one_layer_frees_its_pages() -> None:
    geometry = GEOMETRIES["cpu"]

    async def scenario(callers: list[Caller]) -> None:
        (caller,) = callers
        await caller.create("a")
        for layer, count in ((0, 7), (1, 7), (0, 20)):
            fields = {"layer": layer, "sequences": ["a"], "append_indptr": [0, count]}
            new = {"k": rows(1, count, geometry), "v": rows(2, count, geometry)}
            await caller.call("append", fields, **new)
        reply = await caller.call("truncate", {"id": "a", "layer": 0, "length": 8})
        assert (reply.fields["lengths"], reply.fields["pages"]) == ([8, 7], 2)
        await caller.submit(creation({"id": "b", "parent": "a", "length": 7}))
        for length in (4, 9):  # within the page that b shares; beyond the layer's length
            with pytest.raises(Refused, match="length"):
                await caller.call("truncate", {"id": "a", "layer": 0, "length": length})
        with pytest.raises(Refused, match="layer"):
            await caller.call("truncate", {"id": "a", "layer": 2, "length": 7})

    on_ranks("cpu", 1, scenario)


def test_a_claimed_shard_accepts_requests_of_its_epoch_only() -> None:
    geometry = GEOMETRIES["cpu"]

    async def scenario(callers: list[Caller]) -> None:
        (caller,) = callers
        page = geometry.page_size

        async def refused(name: str, fields: dict[str, Any], code: str, **tensors: Any) -> None:
            await caller.refused(NewCall(name, fields, tensors), code)

        new = {"id": "a", "shard": {"rank": 1, "ranks": 2}, "epoch": 5}
        await caller.submit(creation(new, {"id": "whole"}))
        some = {"k": rows(1, 1, geometry), "v": rows(2, 1, geometry)}
        q = queries(1, 1, geometry)
        at: dict[str, Any] = {"layer": 0, "sequences": ["a"], "offsets": [0]}
        for epochs in ({}, {"epochs": [0]}, {"epochs": [4]}, {"epochs": [6]}):
            await refused("append", at | epochs, "sequence_taken", **some)
            await refused("decode", at | epochs, "sequence_taken", q=q, **some)
            await refused("decode", at | epochs, "sequence_taken", q=q)
        await refused("append", at | {"epochs": [5, 5]}, "invalid_request", **some)
        # the row is another rank's, and counts all the same
        await caller.call("append", at | {"epochs": [5]}, **some)
        await refused("append", at | {"epochs": [5]}, "length_mismatch", **some)
        await refused("decode", at | {"epochs": [5]}, "length_mismatch", q=q)
        reply = await caller.view("a")
        assert reply["lengths"] == [0, 0]
        assert (reply["shard"]["epoch"], reply["shard"]["lengths"]) == (5, [1, 0])
        for epoch in (0, 4, 5):
            await refused("claim", {"id": "a", "epoch": epoch}, "sequence_taken")
        await refused("claim", {"id": "whole", "epoch": 9}, "unknown_sequence")
        whole = {"layer": 0, "sequences": ["whole"], "epochs": [9]}
        await refused("append", whole, "sequence_taken", **some)
        claimed = (await caller.call("claim", {"id": "a", "epoch": 7})).fields
        assert claimed == {"epoch": 5, "lengths": [1, 0]}
        await refused("append", at | {"offsets": [1], "epochs": [5]}, "sequence_taken", **some)
        read = {"layer": 0, "sequences": ["a"]}
        await refused("gather", read | {"epochs": [5]}, "sequence_taken")
        count = 2 * page
        more = {"k": rows(3, count, geometry), "v": rows(4, count, geometry)}
        for layer, before in ((0, 1), (1, 0)):
            fields = {"layer": layer, "offsets": [before], "append_indptr": [0, count]}
            await caller.call("append", at | fields | {"epochs": [7]}, **more)
        await refused("truncate", {"id": "a", "length": 1}, "sequence_taken")
        await refused("truncate", {"id": "a", "length": 1, "epoch": 6}, "sequence_taken")
        longer = {"id": "a", "length": count + 1, "epoch": 7}
        await refused("truncate", longer, "invalid_request")
        fork = {"id": "f", "parent": "a", "length": count}
        for epoch in ({}, {"epoch": 5}, {"epoch": 8}):
            await refused("create_sequences", {"sequences": [fork | epoch]}, "sequence_taken")
        await caller.submit(creation(fork | {"epoch": 7}))
        reply = (await caller.call("truncate", {"id": "a", "length": 1, "epoch": 8})).fields
        assert (reply["shard"]["epoch"], reply["shard"]["lengths"]) == (8, [1, 1])
        reply = await caller.view("f")
        assert reply["lengths"] == [page, page]
        assert (reply["shard"]["epoch"], reply["shard"]["lengths"]) == (7, [count, count])
        pool = (await caller.call("pool")).fields
        assert pool["integrity"] == "ok"

    on_ranks("cpu", 1, scenario)


def test_epochs_of_a_whole_sequence_are_refused_and_bring_no_handlers_for_shards() -> None:
    geometry = GEOMETRIES["cpu"]

    async def scenario(callers: list[Caller]) -> None:
        (caller,) = callers
        await caller.create("a")
        some = {"k": rows(1, 1, geometry), "v": rows(2, 1, geometry)}
        append = {"layer": 0, "sequences": ["a"]}
        refused: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
            ("append", append | {"epochs": [9]}, some, "sequence_taken"),
            ("gather", append | {"epochs": [9]}, {}, "sequence_taken"),
            ("truncate", {"id": "a", "length": 0, "epoch": 9}, {}, "sequence_taken"),
            ("claim", {"id": "a", "epoch": 9}, {}, "unknown_sequence"),
        ]
        for name, fields, tensors, code in refused:
            await caller.refused(NewCall(name, fields, tensors), code)
        fork = {"sequences": [{"parent": "a", "epoch": 9}]}
        with pytest.raises(Refused, match="another writer"):
            await caller.call("create_sequences", fork)
        assert not caller.engine.store.has_shards
        await caller.call("append", append | {"epochs": [0]}, **some)

    on_ranks("cpu", 1, scenario)
