"""With `numerics: invariant` a row has the same bits by every way in, and a model its logits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from attnd import Client, NewSequence, Prefix, Session
from attnd.torch import TimeSliced

from bench.driver.servers import free_port
from kernels import cuda_devices
from tests.client.running_service import service
from tests.harness.waiting import wait_for
from tests.session.stepping import Served

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 6, 2, 64, 32, 50
PAGE = 16
BATCH = 64
SHARED = 2100
"""Tokens that rows share: several of each backend's splits."""


@dataclass(frozen=True)
class Ways:
    """One engine: the addresses of HTTP and of the gateway, a session, and what opens more."""

    where: str
    inference: str
    session: Session
    served: Served


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ways(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ways]:
    path = str(Path(tmp_path_factory.mktemp("ways"), "engine.sock"))
    given = ("--engine.numerics", "invariant", "--pool.num-pages", "900", "--server.socket", path)
    if request.param == "cuda":
        if not cuda_devices():
            pytest.skip("no CUDA device")
        given += ("--backend.kind", "cuda", "--pool.dtype", "fp16")
    port = str(free_port())
    given += ("--server.port", "0", "--oip.http-port", port)
    with service(*given) as where, Session(path) as session:
        assert session.info().numerics == "invariant"
        yield Ways(where, f"http://127.0.0.1:{port}", session, Served(request.param, path))
        session.delete_sequences(prefix="")


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


class Model:
    """Attention, projections and a residual; all but attention works on one row at a time."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._embedding = normal(rng, VOCABULARY, WIDTH)
        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self._in = [[normal(rng, WIDTH, n) * 0.2 for n in sizes] for _ in range(LAYERS)]
        self._out = [normal(rng, HEADS * DIM, WIDTH) * 0.1 for _ in range(LAYERS)]

    def logits(self, caller: Any, names: Sequence[str], tokens: Sequence[Any]) -> list[bytes]:
        """The bits of each sequence's last logits, when its next tokens have been appended."""
        indptr = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        x = self._embedding[np.concatenate(tokens)]
        for layer in range(LAYERS):
            parts = [np.stack([row @ w for row in x]) for w in self._in[layer]]
            q, k, v = (part.reshape(len(x), -1, DIM) for part in parts)
            o = caller.prefill(layer, names, q, indptr, k=k, v=v, causal=True).o
            x = x + np.stack([row.reshape(-1) @ self._out[layer] for row in o])
        return [(self._embedding @ x[end - 1]).tobytes() for end in indptr[1:]]


def test_a_prompt_has_its_logits_cached_or_not_alone_and_in_a_batch_of_64(ways: Ways) -> None:
    rng, model, session = np.random.default_rng(3), Model(4), ways.session
    prompt = rng.integers(0, VOCABULARY, 4 * PAGE + 6)
    others = [rng.integers(0, VOCABULARY, rng.integers(1, 30)) for _ in range(BATCH - 2)]
    session.create_sequence("cold")
    (wanted,) = model.logits(session, ["cold"], [prompt])
    session.commit("cold", Prefix(prompt[: 4 * PAGE]))

    cached = session.create_sequence("hit", prefix=Prefix(prompt)).cached_len
    assert cached == 4 * PAGE
    assert model.logits(session, ["hit"], [prompt[cached:]]) == [wanted]

    names = [f"b{i}" for i in range(BATCH)]
    made = [NewSequence(name) for name in names[1:]]
    session.create_sequences([NewSequence(names[0], prefix=Prefix(prompt)), *made])
    batch = [prompt[cached:], prompt, *others]
    assert model.logits(session, names, batch)[:2] == [wanted, wanted]

    step = np.array([7])
    (after,) = model.logits(session, ["cold"], [step])
    assert model.logits(session, ["hit", *names], [step] * (BATCH + 1))[:3] == [after] * 3
    session.delete_sequences(prefix="")


def test_a_row_has_the_same_bits_by_every_way_in(ways: Ways) -> None:
    rng, session, count = np.random.default_rng(5), ways.session, 8
    session.create_sequence("shared")
    for layer in range(LAYERS):
        k, v = (normal(rng, SHARED, KV_HEADS, DIM) for _ in range(2))
        session.append(layer, ["shared"], k, v, append_indptr=[0, SHARED])
    names = [f"f{i}" for i in range(count)]
    session.create_sequences([NewSequence(name, parent="shared") for name in names])
    q, k, v = (normal(rng, count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q = q.astype(np.float16).astype(np.float32)  # what slots beside a pool of fp16 can hold
    for layer in range(LAYERS):
        session.append(layer, names, k, v, append_indptr=list(range(count + 1)))

    wanted = session.decode(0, names, q)
    found = {"alone": [session.decode(0, [n], q[i : i + 1]) for i, n in enumerate(names)]}
    for o, lse in stepped(ways.served, names, q):
        assert o.tobytes() == wanted.o.astype(o.dtype).tobytes()
        assert lse.tobytes() == wanted.lse.tobytes()
    with Client(ways.where) as client:
        found["http"] = [client.decode(0, names, q, cascade=how) for how in ("never", "always")]
    for way, states in found.items():
        o, lse = (np.concatenate([getattr(s, part) for s in states]) for part in ("o", "lse"))
        copies = len(o) // count
        assert o.tobytes() == wanted.o.tobytes() * copies, way
        assert lse.tobytes() == wanted.lse.tobytes() * copies, way
    o, lse = inferred(ways, names, q)
    assert (o.tobytes(), lse.tobytes()) == (wanted.o.tobytes(), wanted.lse.tobytes())
    session.delete_sequences(prefix="")


def stepped(served: Served, names: Sequence[str], q: np.ndarray) -> list[list[np.ndarray]]:
    """o and lse of layer 0 in four steps; the later ones replay the first: on CUDA, its graph."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TimeSliced)  # one GPU for engine and test, without MPS
        with served.session() as session:
            slots = session.slots(len(q), HEADS)
            for _ in range(4):
                with session.step(names, slots, append=False) as step:
                    for layer in step.layers:
                        step.q(layer).copy_(torch.from_numpy(q))
                        parts = (step.attend(layer), step.lse(layer))
                        if layer == 0:
                            kept = [part.clone() for part in parts]
                step.wait()
                found.append([part.cpu().numpy() for part in kept])
    return found


def inferred(ways: Ways, names: Sequence[str], q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of a decode at layer 0 by the Open Inference Protocol."""
    given = {"name": "q", "shape": q.shape, "datatype": "FP32", "data": q.ravel().tolist()}
    fields = {"layer": 0, "sequences": json.dumps(list(names))}
    body = {"inputs": [given], "parameters": fields}
    wait_for(lambda: is_ready(ways.inference), "the gateway")
    reply = httpx.post(f"{ways.inference}/v2/models/decode/infer", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    tensors = {one["name"]: one for one in reply.json()["outputs"]}
    o, lse = (np.array(tensors[name]["data"], np.float32) for name in ("o", "lse"))
    return o.reshape(tensors["o"]["shape"]), lse.reshape(tensors["lse"]["shape"])


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/v2/health/ready").is_success
    return False
