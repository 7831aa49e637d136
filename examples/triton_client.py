"""tritonclient, as it comes from the package index, appends, forks, decodes and merges in attnd.

    python examples/triton_client.py [--protocol http|grpc]

Needs `pip install 'tritonclient[http,grpc]' grpcio protobuf`. It starts a service of its own on
free TCP ports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import time
from typing import Any

import numpy as np
from local_service import serve_tcp

SETTINGS = {
    "pool.num-layers": 1,
    "pool.num-kv-heads": 2,
    "pool.head-dim": 64,
    "pool.dtype": "fp16",
}
TOKENS = 1000
FORKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    protocol = parser.parse_args().protocol
    port = free_port()
    settings = {**SETTINGS, "server.port": free_port(), f"oip.{protocol}-port": port}
    with serve_tcp(settings):
        module = importlib.import_module(f"tritonclient.{protocol}")
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            wait_ready(client)
            show(Caller(module, client))


class Caller:
    """Calls models: tensors by name, fields as parameters, lists of them as JSON."""

    def __init__(self, module: Any, client: Any) -> None:
        self.module = module
        self.client = client

    def __call__(self, model: str, tensors: dict[str, np.ndarray], **fields: Any) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        inputs = []
        for name, array in tensors.items():
            given = self.module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            inputs.append(given.set_data_from_numpy(array))
        parameters = {
            name: json.dumps(value) if isinstance(value, (list, dict)) else value
            for name, value in fields.items()
        }
        return self.client.infer(model, inputs, parameters=parameters)


def show(call: Caller) -> None:
    from tritonclient.utils import InferenceServerException

    client = call.client
    print(f"ready: {client.is_server_ready()}, decode: {client.is_model_ready('decode')}")
    rng = np.random.default_rng(0)

    def rows(count: int, heads: int) -> np.ndarray:
        return rng.standard_normal((count, heads, 64)).astype(np.float16)

    call("create_sequences", {}, sequences=[{"id": "prompt"}])
    kv = {"k": rows(TOKENS, 2), "v": rows(TOKENS, 2)}
    indptr = np.array([0, TOKENS], np.int32)  # an indptr may be an input, or a parameter
    call("append", {**kv, "append_indptr": indptr}, layer=0, sequences=["prompt"])

    forks = [f"fork-{i}" for i in range(FORKS)]
    call("create_sequences", {}, sequences=[{"id": name, "parent": "prompt"} for name in forks])
    q = rows(FORKS, 8)
    state = call("decode", {"q": q}, layer=0, sequences=forks)
    o, lse = state.as_numpy("o"), state.as_numpy("lse")
    print(f"decode of {FORKS} forks: o {o.shape} {o.dtype}, lse {lse.shape}")

    # A second state of the same rows over other keys; then both, merged.
    other = call(
        "ragged_prefill",
        {"q": q, **{name: one[:FORKS] for name, one in kv.items()}},
        qo_indptr=[0, FORKS],
        kv_indptr=[0, FORKS],
    )
    states = {
        "o": np.stack((o, other.as_numpy("o")), axis=1),
        "lse": np.stack((lse, other.as_numpy("lse")), axis=1),
    }
    merged = call("merge", states)
    grown = bool((merged.as_numpy("lse") > lse).all())
    print(f"merged: o {merged.as_numpy('o').shape}, every lse has grown: {grown}")

    try:
        call("append", kv, layer=0, sequences=["prompt"], append_indptr=[0, TOKENS], offsets=[7])
    except InferenceServerException as error:
        print(f"rejected with {error.status()}: {error.message()}")


def wait_ready(client: Any) -> None:
    """Wait for the gateway, which is a process and starts by itself."""
    from tritonclient.utils import InferenceServerException

    for _ in range(100):
        try:
            if client.is_server_ready():
                return
        except InferenceServerException:
            pass  # not listening yet
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
