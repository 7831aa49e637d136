"""Before `ready`: the self-test, a small prefill, fork and decode against plain float64; and the
calibration, which measures attention so that the first slices have the right length.

Both run through the real backend and pool, on pages that are free again afterwards. The first guess
of a processor's pace may be ten times too fast, and all that wait together share a launch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from attnd.wire.images import RESPONSE
from numpy.typing import NDArray

from kernels.backend import (
    NUMPY_DTYPES,
    TENSOR_DTYPES,
    Array,
    Attend,
    DType,
    LayerGroup,
    Level,
    Plan,
    PoolGeometry,
    Scoring,
)
from service.engine.loop.scheduler import handle
from service.engine.store.store import Store
from service.engine.work.request import AnswerPlace, Request
from service.engine.work.work import Cost, Seconds, SharedAttention, SlicedWork, SoloLaunch
from service.image.json_body import read_image
from service.operations.schema.spec import validate
from service.operations.table import BY_NAME

Float64 = NDArray[np.float64]
Rows = tuple[Array, Array]
Stored = tuple[Float64, Float64]

TRUNK: Final = "attnd:self-test:trunk"
FORK: Final = "attnd:self-test:fork"
MAX_TOKENS: Final = 40
GROUP_SIZE: Final = 2
TOLERANCE: Final[dict[DType, float]] = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}


class SelfTestFailed(RuntimeError):
    """The backend computes something else than attention."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the trunk, and of its fork (None: the pool has no room for one)."""

    trunk: int
    fork: int | None


def self_test(store: Store) -> None:
    """Raises `SelfTestFailed` with both numbers, or the backend's error."""
    geometry = store.geometry
    lengths = lengths_for(geometry)
    free = store.tree.allocator.num_free
    try:
        check_trunk_and_fork(store, lengths)
    finally:
        known = [view.id for view in store.tree.list(None, 2)]
        store.tree.free(known)
    if store.tree.allocator.num_free != free:
        raise SelfTestFailed(f"{store.tree.allocator.num_free} pages are free, {free} were before")
    store.plans.clear()


def lengths_for(geometry: PoolGeometry) -> Lengths:
    """A trunk of a page and a bit, forked within its second page; less where the pool is tiny."""
    trunk = min(geometry.page_size + 3, MAX_TOKENS)
    pages = -(-trunk // geometry.page_size)
    if geometry.num_pages >= 2 * (pages + 1):
        return Lengths(trunk, trunk - 1)
    return Lengths(min(trunk, geometry.num_pages * geometry.page_size - 1), None)


def check_trunk_and_fork(store: Store, lengths: Lengths) -> None:
    """Append to every layer; on the last: causal prefill, fork, decode with an append, decode."""
    geometry = store.geometry
    leading = geometry.groups[geometry.leading]
    layer = leading.layers[-1]
    rng = np.random.default_rng(0)
    (k, v), stored = random_rows(rng, geometry, leading, lengths.trunk)
    run(store, "create_sequences", {"sequences": [{"id": TRUNK}]})
    rows = {"sequences": [TRUNK], "append_indptr": [0, lengths.trunk]}
    for each in set(range(geometry.num_layers)) - {layer}:
        (own_k, own_v), _ = random_rows(rng, geometry, geometry.group_of(each), lengths.trunk)
        run(store, "append", {"layer": each, **rows}, k=own_k, v=own_v)
    q = random_q(rng, geometry, lengths.trunk)
    fields: dict[str, Any] = {"layer": layer, "sequences": [TRUNK], "causal": True}
    answer = run(store, "prefill", {**fields, "qo_indptr": [0, lengths.trunk]}, q=q, k=k, v=v)
    compare("prefill", answer, *dense(q, *stored), q.dtype)

    ids, held = [TRUNK], [stored]
    if lengths.fork is not None:
        fork = {"id": FORK, "parent": TRUNK, "length": lengths.fork}
        run(store, "create_sequences", {"sequences": [fork]})
        ids.append(FORK)
        held.append((stored[0][: lengths.fork], stored[1][: lengths.fork]))
    q = random_q(rng, geometry, len(ids))
    (k, v), added = random_rows(rng, geometry, leading, len(ids))
    wanted = [
        dense(q[i : i + 1], *(np.concatenate((held[i][s], added[s][i : i + 1])) for s in (0, 1)))
        for i in range(len(ids))
    ]
    o, lse = (np.concatenate(part) for part in zip(*wanted, strict=True))
    step: dict[str, Any] = {"layer": layer, "sequences": ids}
    answer = run(store, "decode", {**step, "cascade": "always"}, q=q, k=k, v=v)
    compare("decode by cascade", answer, o, lse, q.dtype)
    compare("flat decode", run(store, "decode", {**step, "cascade": "never"}, q=q), o, lse, q.dtype)


def run(store: Store, name: str, fields: dict[str, Any], **tensors: Array) -> dict[str, Array]:
    """One operation from its turn to its answer's tensors."""
    operation, answer = BY_NAME[name], AnswerPlace()
    request = Request(operation, validate(operation.fields, fields), tensors, answer)
    work = handle(store, request, Seconds())
    match work:
        case SharedAttention(attends, finish):
            states = store.backend.attend(attends).result()
            if finish is not None:
                finish(states)
        case SoloLaunch(start, finish, _, _):
            finish(start().result())
        case SlicedWork():
            work.run()
    if answer.image is None:
        raise SelfTestFailed(f"{name} has no answer")
    return read_image(answer.image, RESPONSE)[1]


def compare(
    name: str, answer: dict[str, Array], o: Float64, lse: Float64, dtype: np.dtype[Any]
) -> None:
    """Raises `SelfTestFailed` where a state is further from (o, lse) than the dtype explains."""
    allowed = next(TOLERANCE[name] for name in TENSOR_DTYPES if NUMPY_DTYPES[name] == dtype)
    for tensor, given, wanted in (("o", answer["o"], o), ("lse", answer["lse"], lse)):
        # written so that a NaN fails
        close = np.abs(given.astype(np.float64) - wanted) <= allowed * (1 + np.abs(wanted))
        if not close.all():
            where = tuple(int(axis[0]) for axis in np.nonzero(~close))
            raise SelfTestFailed(
                f"{name}: {tensor}{list(where)} is {given[where]}, must be {wanted[where]:.6g}"
            )


def dense(q: Array, k: Float64, v: Float64) -> tuple[Float64, Float64]:
    """Causal attention, aligned bottom-right: q [n, Hq, D] over k, v [t, Hkv, D], t >= n."""
    n, t = q.shape[0], k.shape[0]
    keys, values = (np.repeat(rows, GROUP_SIZE, axis=1) for rows in (k, v))
    scores = np.einsum("nhd,thd->nht", q.astype(np.float64), keys) * q.shape[2] ** -0.5
    hidden = np.arange(t)[None, :] > np.arange(n)[:, None] + (t - n)
    weights = np.exp(np.where(hidden[:, None, :], -np.inf, scores))
    total = weights.sum(axis=2)
    return np.einsum("nht,thd->nhd", weights, values) / total[:, :, None], np.log(total)


def random_rows(
    rng: np.random.Generator, geometry: PoolGeometry, group: LayerGroup, n: int
) -> tuple[Rows, Stored]:
    """k and v [n, Hkv, D or Dv] of a group's layers, and their real values in the pool.

    They are made from stored values: a way to round that is right but another cannot show.
    """
    kept, dtype = NUMPY_DTYPES[group.dtype], NUMPY_DTYPES[tensor_dtype(geometry)]
    shape, dims = (n, group.num_kv_heads), (group.head_dim, group.v_head_dim)
    k, v = (
        rng.standard_normal((*shape, dim)).astype(kept).astype(np.float64) * scale
        for dim, scale in zip(dims, geometry.scales_of(group.dtype), strict=True)
    )
    return (k.astype(dtype), v.astype(dtype)), (k, v)


def random_q(rng: np.random.Generator, geometry: PoolGeometry, n: int) -> Array:
    shape = (n, geometry.num_kv_heads * GROUP_SIZE, geometry.head_dim)
    q: Array = rng.standard_normal(shape).astype(NUMPY_DTYPES[tensor_dtype(geometry)])
    return q


def tensor_dtype(geometry: PoolGeometry) -> DType:
    """q, k and v of the self-test: the pool's own dtype, or bf16 beside fp8."""
    return "bf16" if geometry.dtype in ("fp8_e4m3", "fp8_e5m2") else geometry.dtype


ROWS: Final = 32
GUESSED_S: Final = 0.0005
"""Length of one measurement by the first guess."""
MEASUREMENTS: Final = 4
"""The fastest counts: the first prepares, and other programs may disturb some."""
ENOUGH_S: Final = 0.05
"""After this time the second measurement is the last."""
SLOWEST: Final = 16.0
"""Largest factor between the measurement and the first guess that is believed, on a busy host."""


def calibrate(store: Store) -> None:
    """Sets the pace of attention by decodes of `ROWS` rows over the pool's first pages."""
    geometry, pace = store.geometry, store.pace
    heads, dim = geometry.num_kv_heads * GROUP_SIZE, geometry.head_dim
    token = Cost(geometry.token_bytes, 4.0 * heads * dim)
    num_tokens = GUESSED_S / pace.seconds("attend", token)
    num_pages = max(1, int(num_tokens / ROWS / geometry.page_size))
    attend = Attend(
        layer=geometry.groups[geometry.leading].layers[0],
        q=np.zeros((ROWS, heads, dim), NUMPY_DTYPES[tensor_dtype(geometry)]),
        plan=decode_plan(num_pages, geometry.page_size, geometry.num_pages),
        scoring=Scoring(dim**-0.5),
    )
    tokens = ROWS * num_pages * geometry.page_size
    cost = Cost(token.num_bytes * tokens, token.flops * tokens)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < MEASUREMENTS and sum(seconds) < ENOUGH_S):
        started = time.monotonic()
        store.backend.attend([attend]).result()
        seconds.append(time.monotonic() - started)
    pace.start_from("attend", min(max(min(seconds) / pace.seconds("attend", cost), 1.0), SLOWEST))


def decode_plan(num_pages: int, page_size: int, distinct: int) -> Plan:
    """`ROWS` rows that attend `num_pages` full pages each, of `distinct` pages in the pool."""
    rows = np.arange(ROWS + 1, dtype=np.int32)
    pages = np.arange(ROWS * num_pages, dtype=np.int32) % np.int32(distinct)
    full = np.full(ROWS, page_size, np.int32)
    level = Level(rows, rows * np.int32(num_pages), pages, full, np.zeros_like(full), False)
    return Plan((level,), full * np.int32(num_pages) - np.int32(1))
