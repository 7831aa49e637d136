"""Ragged attention that the cuda backend must not run on its Hopper kernel comes out the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import make_backend
from kernels.backend import PoolGeometry, RaggedAttend, Scoring
from service.engine.attention import past_boxes
from service.engine.masks import ragged_mask

QO = np.array([0, 5, 8], np.int32)
KV = np.array([0, 7, 20], np.int32)


def request(head_dim: int = 64, cap: float = 0.0, masked: bool = False) -> RaggedAttend:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((8, 2, head_dim), np.float32)
    k, v = rng.standard_normal((2, 20, 1, head_dim), np.float32)
    given = rng.random(5 * 7 + 3 * 13) < 0.5
    mask = ragged_mask(given, False, QO, np.diff(KV), None) if masked else None
    scoring = Scoring(head_dim**-0.5, cap)
    return RaggedAttend(
        q=q, k=k, v=v, qo_indptr=QO, kv_indptr=KV, causal=True, scoring=scoring, mask=mask
    )


@pytest.mark.parametrize("options", [{"cap": 4.0}, {"masked": True}, {"cap": 4.0, "masked": True}])
def test_the_turned_request_has_the_same_states(options: dict[str, Any]) -> None:
    asked = request(**options)
    turned = past_boxes("cuda", asked)
    assert turned.scoring.sm_scale == -asked.scoring.sm_scale < 0
    backend = make_backend("cpu", PoolGeometry(1, 1, 16, 1, 64, dtype="fp32"))
    try:
        want, got = (backend.attend_ragged(r).result() for r in (asked, turned))
    finally:
        backend.close()
    np.testing.assert_allclose(got.o, want.o, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "asked"),
    [
        ("cpu", request(cap=4.0)),
        ("cuda", request()),
        ("cuda", request(head_dim=128, cap=4.0, masked=True)),
        ("cuda", replace(request(cap=4.0), scoring=Scoring(-0.5, 4.0))),
        ("cuda", replace(request(masked=True), scoring=Scoring(0.0))),
    ],
    ids=["cpu", "plain", "128", "negative", "zero"],
)
def test_any_other_request_stays_as_it_is(backend: str, asked: RaggedAttend) -> None:
    assert past_boxes(backend, asked) is asked
