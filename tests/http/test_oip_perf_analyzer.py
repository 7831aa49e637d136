"""The requests that Triton's perf_analyzer makes with `--shared-memory system`, in their order.

The tool itself is in no package index. Over HTTP its requests are spelled out here; over gRPC they
are tritonclient's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import oracle
import pytest
from http_service import Service, serving
from regions import Region, memory
from triton_callers import Triton

OUTPUT_BYTES = 102_400
"""`--output-shared-memory-size`: what the tool takes for an output of unknown size."""
INFERENCES = 5
RNG = np.random.default_rng(3)
STATES = {
    "o": RNG.standard_normal((4, 2, 8)).astype(np.float32),
    "lse": RNG.random((4, 2)).astype(np.float32),
    "indptr": np.array([0, 3, 4], np.int32),
}
"""All inputs of `merge`: the tool leaves out none in shared memory, not even optional ones."""
DATATYPES = {"o": "FP32", "lse": "FP32", "indptr": "INT32"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("--server.client-shm", "true") as running:
        yield running


def post(client: httpx.Client, path: str, document: Any = None) -> Any:
    content = b"" if document is None else json.dumps(document).encode()
    length = {"inference-header-content-length": str(len(content))} if "/infer" in path else {}
    response = client.post(path, content=content, headers=length)
    assert response.status_code == 200, response.text
    return response.json()


def check_outputs(regions: dict[str, Region]) -> None:
    o, lse = STATES["o"], STATES["lse"]
    parts = [(o[i : i + 1], lse[i : i + 1]) for i in range(3)]
    merged = oracle.merge(parts)
    found = regions["o"].get((2, 2, 8), np.float32), regions["lse"].get((2, 2), np.float32)
    np.testing.assert_allclose(found[0][:1], merged[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1][:1], merged[1], rtol=1e-5)
    np.testing.assert_array_equal(found[0][1], o[3])


def made_regions(stack: ExitStack) -> tuple[dict[str, Region], dict[str, Region]]:
    """Memory for outputs and for inputs."""
    outputs = {name: stack.enter_context(memory(OUTPUT_BYTES)) for name in ("o", "lse")}
    inputs = {name: stack.enter_context(memory(array.nbytes)) for name, array in STATES.items()}
    for name, array in STATES.items():
        inputs[name].put(array)
    return outputs, inputs


def durations(stats: dict[str, Any]) -> list[int]:
    """What the tool takes from a model's statistics; all of it must be there."""
    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return [int(stats["inference_stats"][name]["ns"]) for name in names]


def test_its_requests_over_http_are_answered_as_it_needs_them(client: httpx.Client) -> None:
    assert "system_shared_memory" in client.get("/v2").json()["extensions"]
    metadata = client.get("/v2/models/merge").json()
    config = client.get("/v2/models/merge/config").json()
    assert config["max_batch_size"] == 0
    assert [one["name"] for one in config["input"]] == list(STATES)
    assert {one["name"]: one["datatype"] for one in metadata["inputs"]} == DATATYPES
    for kind in ("system", "cuda"):
        post(client, f"/v2/{kind}sharedmemory/unregister")
    with ExitStack() as stack:
        outputs, inputs = made_regions(stack)
        for region in (*outputs.values(), *inputs.values()):
            size = len(region.all_bytes())
            given = {"key": region.key, "offset": 0, "byte_size": size}
            post(client, f"/v2/systemsharedmemory/region/{region.name}/register", given)
        before = client.get("/v2/models/merge/stats").json()["model_stats"][0]
        for number in range(INFERENCES):
            post(client, "/v2/models/merge/infer", request(str(number), inputs, outputs))
        after = client.get("/v2/models/merge/stats").json()["model_stats"][0]
        check_outputs(outputs)
        for kind in ("system", "cuda"):
            post(client, f"/v2/{kind}sharedmemory/unregister")
    for count in ("inference_count", "execution_count"):
        assert after[count] - before[count] == INFERENCES
    assert durations(after)[0] > durations(before)[0]


def request(name: str, inputs: dict[str, Region], outputs: dict[str, Region]) -> Any:
    given = [
        {
            "name": one,
            "shape": STATES[one].shape,
            "datatype": DATATYPES[one],
            "parameters": place(region, STATES[one].nbytes),
        }
        for one, region in inputs.items()
    ]
    wanted = [
        {"name": one, "parameters": place(region, OUTPUT_BYTES)} for one, region in outputs.items()
    ]
    return {"id": name, "inputs": given, "outputs": wanted}


def place(region: Region, size: int) -> dict[str, Any]:
    return {"shared_memory_region": region.name, "shared_memory_byte_size": size}


def test_its_requests_over_grpc_are_answered_as_it_needs_them(over_grpc: Triton) -> None:
    client, module = over_grpc.client, over_grpc.module
    assert "system_shared_memory" in client.get_server_metadata().extensions
    client.get_model_metadata("merge")
    assert client.get_model_config("merge").config.max_batch_size == 0
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    with ExitStack() as stack:
        outputs, inputs = made_regions(stack)
        for region in (*outputs.values(), *inputs.values()):
            size = len(region.all_bytes())
            client.register_system_shared_memory(region.name, region.key, size)
        given, wanted = [], []
        for name, region in inputs.items():
            one = module.InferInput(name, STATES[name].shape, DATATYPES[name])
            given.append(one.set_shared_memory(region.name, STATES[name].nbytes))
        for name, region in outputs.items():
            output = module.InferRequestedOutput(name)
            output.set_shared_memory(region.name, OUTPUT_BYTES)
            wanted.append(output)
        before = client.get_inference_statistics("merge").model_stats[0]
        for number in range(INFERENCES):
            client.infer("merge", given, outputs=wanted, request_id=str(number))
        after = client.get_inference_statistics("merge").model_stats[0]
        check_outputs(outputs)
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
    assert after.inference_count - before.inference_count == INFERENCES
    assert after.execution_count - before.execution_count == INFERENCES
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert after.inference_stats.queue.ns == 0
