"""KServe's own client, unmodified, against a gateway; run in an environment that has kserve.

python kserve_calls.py HTTP_URL GRPC_ADDRESS    prints what it got, as JSON
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

STATES = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
LSE = np.zeros((1, 2, 2), np.float32)


def request(binary: bool, **how: Any) -> InferRequest:
    """The merge of two states, with parameters as clients of MLServer send them."""
    inputs = []
    for name, array in (("o", STATES), ("lse", LSE)):
        given = InferInput(name, list(array.shape), "FP32", parameters={"content_type": "np"})
        given.set_data_from_numpy(array, binary_data=binary)
        inputs.append(given)
    return InferRequest("merge", inputs, parameters={"content_type": "np"}, **how)


def seen(response: Any) -> dict[str, Any]:
    return {one.name: [one.as_numpy().tolist(), list(one.shape)] for one in response.outputs}


async def main(url: str, address: str) -> None:
    found: dict[str, Any] = {}
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as rest:
        found["rest"] = [
            await rest.is_server_live(url),
            await rest.is_server_ready(url),
            await rest.is_model_ready(url, "merge"),
            await rest.is_model_ready(url, "no_such_model"),
        ]
        found["rest, numbers"] = seen(await rest.infer(url, request(False), "merge"))
        outputs = [RequestedOutput(name, {"binary_data": True}) for name in ("o", "lse")]
        whole = request(True, request_outputs=outputs)
        found["rest, binary"] = seen(await rest.infer(url, whole, "merge"))
    async with InferenceGRPCClient(address, retries=0) as grpc:
        found["grpc"] = [
            await grpc.is_server_live(),
            await grpc.is_server_ready(),
            await grpc.is_model_ready("merge"),
        ]
        for name, binary in (("grpc, numbers", False), ("grpc, binary", True)):
            found[name] = seen(await grpc.infer(request(binary)))
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
