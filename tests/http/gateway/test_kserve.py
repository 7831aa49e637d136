"""KServe's own client, over REST and gRPC, gets from the gateway what the operation gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from triton_callers import Gateway

pytestmark = pytest.mark.long

PYTHON = Path(sys.prefix, "kserve/bin/python")
"""An environment of its own: kserve needs packages by the dozen."""


def test_kserves_client_calls_models(gateway: Gateway) -> None:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make setup")
    script = Path(__file__).with_name("kserve_calls.py")
    command = [PYTHON, script, gateway.url, f"127.0.0.1:{gateway.grpc_port}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("rest") == [True, True, True, False]
    assert found.pop("grpc") == [True, True, True]
    merged = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2).mean(axis=1)
    assert set(found) == {
        f"{way}, {form}" for way in ("rest", "grpc") for form in ("numbers", "binary")
    }
    for way, outputs in found.items():
        o, shape = outputs["o"]
        assert shape == [1, 2, 2], way
        np.testing.assert_allclose(np.array(o).reshape(shape), merged, rtol=1e-6, err_msg=way)
        np.testing.assert_allclose(np.ravel(outputs["lse"][0]), np.log(2), rtol=1e-6, err_msg=way)
