"""Of whatever kind a tensor is, and wherever its answer goes: the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from handles import KINDS, Handles, Kind, same
from pooled import Pooled, indptr, int32, normal

from kernels.backend import (
    NUMPY_DTYPES,
    Attend,
    AttentionState,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
    Unsupported,
)
from kernels.masks import make_mask
from kernels.tensor import DeviceTensor, PinnedArray

GEOMETRY = PoolGeometry(2, 64, 16, 2, 64, "NHD", "fp16")
SCORING = Scoring(0.125)
MakeHandles = Callable[[object, Kind], Handles]


@pytest.fixture
def handles(backend) -> Iterator[MakeHandles]:
    made: list[Handles] = []

    def make(pool, kind: Kind) -> Handles:
        if kind == "device" and backend.kind == "cpu":
            pytest.skip("the CPU backend takes tensors of the host")
        made.append(Handles(kind, pool))
        return made[-1]

    yield make
    for one in made:
        one.close()


def host(state: AttentionState) -> tuple[np.ndarray, np.ndarray]:
    return np.array(state.o), np.array(state.lse)


def requests_of(pool, rng) -> list[Attend]:
    """A flat decode, a cascade of two levels in shuffled order, and a causal prefill."""
    pooled = Pooled(pool, rng, "fp16")
    runs = [pooled.add(keys) for keys in (37, 1, 64)]
    flat = pooled.flat(runs, [1, 1, 1], False)
    shared, own = pooled.add(48), [pooled.add(keys) for keys in (5, 16, 33)]
    levels = (
        pooled.level([shared], [3], [0], False),
        pooled.level(own, [1, 1, 1], [48] * 3, True),
    )
    cascade = Plan(levels, int32([52, 63, 80]), int32([2, 0, 1]))
    prefill = pooled.flat([runs[2]], [9], True)
    return [
        Attend(0, normal(rng, (rows, 8, 64), "fp16"), plan, SCORING)
        for plan, rows in ((flat, 3), (cascade, 3), (prefill, 9))
    ]


def with_handles(request: Attend, q: Handles, out: Handles | None, dtype: str) -> Attend:
    values = request.q.astype(NUMPY_DTYPES[dtype])
    place = None if out is None else out.state(values.shape, values.dtype)
    return Attend(request.layer, q.give(values), request.plan, request.scoring, request.mask, place)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("out", [None, *KINDS])
@pytest.mark.parametrize("q", KINDS)
def test_attention_is_the_same_for_every_kind_of_handle(backend, handles, rng, q, out, dtype):
    pool = backend(GEOMETRY)
    asked = [
        Attend(r.layer, r.q.astype(NUMPY_DTYPES[dtype]), r.plan, SCORING)
        for r in requests_of(pool, rng)
    ]
    q_handles, out_handles = handles(pool, q), None if out is None else handles(pool, out)
    for group in (asked[:1], asked[1:2], asked):  # alone, and all in one launch
        want = [host(state) for state in pool.attend(group).result()]
        given = [with_handles(r, q_handles, out_handles, dtype) for r in group]
        got = pool.attend(given).result()
        for request, state, (o, lse) in zip(given, got, want, strict=True):
            if out_handles is None:
                assert same(np.array(state.o), o)
                assert same(np.array(state.lse), lse)
                continue
            assert state is request.out
            assert same(out_handles.read(state.o), o), f"o differs, {len(group)} requests"
            assert same(out_handles.read(state.lse), lse), f"lse differs, {len(group)} requests"


def test_one_launch_takes_handles_of_all_kinds(backend, handles, rng):
    pool = backend(GEOMETRY)
    asked = requests_of(pool, rng)
    want = [host(state) for state in pool.attend(asked).result()]
    kinds: list[Kind] = ["pinned", "host", "device" if backend.kind == "cuda" else "pinned"]
    makers = [handles(pool, kind) for kind in kinds]
    for turn in range(3):
        q, out = makers[turn:] + makers[:turn], makers[turn + 1 :] + makers[: turn + 1]
        given = [with_handles(r, a, b, "fp16") for r, a, b in zip(asked, q, out, strict=True)]
        for state, maker, (o, lse) in zip(pool.attend(given).result(), out, want, strict=True):
            assert same(maker.read(state.o), o)
            assert same(maker.read(state.lse), lse)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_and_unmasked_requests_of_one_call_keep_their_places(backend, handles, rng, kind):
    pool = backend(GEOMETRY)
    flat, cascade, prefill = requests_of(pool, rng)
    mask = make_mask(rng.random(9 * 64) < 0.5, [9], [64])
    asked = [flat, Attend(0, prefill.q, prefill.plan, SCORING, mask), cascade]
    want = [host(state) for state in pool.attend(asked).result()]
    maker = handles(pool, kind)
    given = [with_handles(r, maker, maker, "fp16") for r in asked]
    pending = pool.attend(given)
    for request, state, (o, lse) in zip(given, pending.result(), want, strict=True):
        assert state is request.out
        assert same(maker.read(state.o), o)
        assert same(maker.read(state.lse), lse)
    assert pending.done


@pytest.mark.parametrize("out", [None, *KINDS])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_attention_is_the_same_for_every_kind_of_handle(backend, handles, rng, kind, out):
    pool = backend(GEOMETRY)
    qo, kv = indptr([3, 0, 5]), indptr([9, 4, 5])
    values = [normal(rng, (rows, heads, 64), "fp16") for rows, heads in ((8, 4), (18, 2), (18, 2))]
    want = host(pool.attend_ragged(RaggedAttend(*values, qo, kv, True, SCORING)).result())
    maker, places = handles(pool, kind), None if out is None else handles(pool, out)
    place = None if places is None else places.state((8, 4, 64), np.dtype(np.float16))
    given = [maker.give(v) for v in values]
    got = pool.attend_ragged(RaggedAttend(*given, qo, kv, True, SCORING, out=place)).result()
    read = maker if places is None else places
    assert place is None or got is place
    assert same(read.read(got.o), want[0])
    assert same(read.read(got.lse), want[1])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_appended_and_gathered_through_every_kind_of_handle(
    backend, handles, rng, kind, dtype
):
    pool = backend(GEOMETRY)
    maker = handles(pool, kind)
    k, v = (normal(rng, (21, 2, 64), dtype) for _ in range(2))
    slots, others = int32(rng.permutation(400)[:21]), int32(400 + rng.permutation(400)[:21])
    pool.append(1, k, v, slots)
    pending = pool.append(1, maker.give(k), maker.give(v), others)
    want = pool.gather(1, slots, dtype).result()
    places = tuple(maker.empty((21, 2, 64), NUMPY_DTYPES[dtype]) for _ in range(2))
    got = pool.gather(1, others, dtype, places).result()
    assert pending.done, "what came later is done, this is not"
    assert pending.result() is None
    for tensor, place, values in zip(got, places, want, strict=True):
        assert tensor is place
        assert same(maker.read(tensor), np.array(values))


@pytest.mark.parametrize("where", ["fresh", "into", "out"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_merges_are_the_same_for_every_kind_of_handle(backend, handles, rng, kind, dtype, where):
    pool = backend(GEOMETRY)
    maker = handles(pool, kind)
    lengths = [2, 0, 5]
    o, first_o = (normal(rng, (rows, 4, 64), dtype) for rows in (7, 3))
    lse, first_lse = (normal(rng, (rows, 4), "fp32") for rows in (7, 3))

    def place(make: Handles) -> dict[str, AttentionState]:
        if where == "into":
            return {"into": AttentionState(make.give(first_o), make.give(first_lse))}
        return {"out": make.state((3, 4, 64), o.dtype)} if where == "out" else {}

    ends = indptr(lengths)
    want = host(pool.merge(o, lse, ends, **place(Handles("host", pool))).result())
    given = place(maker)
    got = pool.merge(maker.give(o), maker.give(lse), ends, **given).result()
    assert all(got is state for state in given.values())
    assert same(maker.read(got.o), want[0])
    assert same(maker.read(got.lse), want[1])


def test_places_with_room_between_their_rows_are_filled(backend, rng):
    """An array that is not one run of bytes is a place too, and nothing beside it is written."""
    pool = backend(GEOMETRY)
    request = requests_of(pool, rng)[0]
    o, lse = host(pool.attend([request]).result()[0])
    wide = np.full((3, 8, 80), 7, np.float16)
    tall = np.full((6, 8), 7, np.float32)
    place = AttentionState(wide[:, :, 8:72], tall[::2])
    pool.attend([Attend(0, request.q, request.plan, SCORING, out=place)]).result()
    assert same(wide[:, :, 8:72].copy(), o)
    assert same(tall[::2].copy(), lse)
    assert (wide[:, :, :8] == 7).all()
    assert (wide[:, :, 72:] == 7).all()
    assert (tall[1::2] == 7).all()


def test_places_of_no_rows_are_legal(backend):
    pool = backend(GEOMETRY)
    places = tuple(np.zeros((0, 2, 64), np.float16) for _ in range(2))
    assert pool.gather(0, int32([]), "fp16", places).result()[0] is places[0]
    place = AttentionState(np.zeros((0, 4, 64), np.float16), np.zeros((0, 4), np.float32))
    none = np.zeros((0, 4, 64), np.float16), np.zeros((0, 4), np.float32)
    assert pool.merge(*none, int32([0]), out=place).result() is place


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (AttentionState(np.zeros((3, 8, 64), np.float32), np.zeros((3, 8), np.float32)), "out.o"),
        (AttentionState(np.zeros((2, 8, 64), np.float16), np.zeros((3, 8), np.float32)), "out.o"),
        (AttentionState(np.zeros((3, 8, 64), np.float16), np.zeros((3, 8), np.float16)), "out.lse"),
    ],
)
def test_a_place_of_another_shape_or_dtype_is_refused_by_name(backend, rng, place, names):
    pool = backend(GEOMETRY)
    request = requests_of(pool, rng)[0]
    with pytest.raises(ValueError, match=rf"{names} is .*must be"):
        pool.attend([Attend(0, request.q, request.plan, SCORING, out=place)])


def test_a_place_that_cannot_be_written_to_is_refused(backend, rng):
    pool = backend(GEOMETRY)
    place = np.zeros((2, 2, 64), np.float16)
    place.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pool.gather(0, int32([0, 1]), "fp16", (place.copy(), place))


def test_a_merge_into_states_has_no_other_place(backend):
    pool = backend(GEOMETRY)
    state = AttentionState(np.zeros((1, 4, 64), np.float16), np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="into and out"):
        pool.merge(state.o, state.lse, int32([0, 1]), state, state)


def test_unregistering_unknown_memory_has_no_effect(backend):
    backend(GEOMETRY).unregister(1 << 20)


def test_the_cpu_backend_pins_nothing_and_refuses_device_tensors_by_name(rng):
    from kernels import make_backend

    pool = make_backend("cpu", GEOMETRY)
    request = requests_of(pool, rng)[0]
    device = DeviceTensor(np.dtype(np.float16), (3, 8, 64), 4096, 0)
    rows = DeviceTensor(np.dtype(np.float16), (1, 2, 64), 4096, 0)
    place = AttentionState(device, np.zeros((3, 8), np.float32))
    calls = {
        "q": lambda: pool.attend([Attend(0, device, request.plan, SCORING)]),
        "out.o": lambda: pool.attend([Attend(0, request.q, request.plan, SCORING, out=place)]),
        "k": lambda: pool.append(0, rows, rows, int32([0])),
        "out.k": lambda: pool.gather(0, int32([0]), "fp16", (rows, rows)),
        "o": lambda: pool.merge(device, np.zeros((3, 8), np.float32), int32([0, 3])),
    }
    for field, call in calls.items():
        with pytest.raises(Unsupported, match="device tensor") as raised:
            call()
        assert raised.value.field == field
    assert not pool.register(4096, 4096)
    pool.close()


def test_a_slice_of_pinned_memory_is_pinned_and_a_copy_is_not():
    whole = np.frombuffer(bytearray(64), np.uint8).view(PinnedArray)
    assert whole.is_pinned
    part = whole[8:24].view(np.float16).reshape(2, 4)
    assert isinstance(part, PinnedArray)
    assert part.is_pinned
    assert part[1:].is_pinned
    for copy in (part.copy(), part.astype(np.float32), part + part, part.copy()[1:]):
        assert not (isinstance(copy, PinnedArray) and copy.is_pinned)


def test_rows_of_a_device_tensor_are_its_memory():
    tensor = DeviceTensor(np.dtype(np.float16), (5, 2, 8), 1024, 3, "owner")
    rows = tensor[1:3]
    assert (rows.shape, rows.address, rows.stream, rows.owner) == ((2, 2, 8), 1056, 3, "owner")
    assert (len(rows), rows.ndim, rows.size, rows.nbytes) == (2, 3, 32, 64)
    assert tensor[4:2].shape == (0, 2, 8)
    with pytest.raises(ValueError, match="step 1 only"):
        tensor[::2]
