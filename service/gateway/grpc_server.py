"""The protocol over gRPC: the methods of `open_inference.proto`, served by grpc.aio."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.doors.kit.ledger import GatewayRequest
from service.doors.kit.problems import grpc_code
from service.doors.kit.process import DRAINING, descriptors
from service.doors.kit.tls import HANDSHAKE_S
from service.doors.kit.upstream import EngineReply
from service.errors import InvalidRequest, MalformedBody, NotReady, RequestTimeout
from service.gateway.gateway import OPEN_METHODS, Gateway, RefusedRequest
from service.gateway.models import DTYPES_BY_DATATYPE, VERSION, model_of
from service.gateway.requests import Inference, RequestBody, parameters_of, read_body
from service.gateway.upstream import Caller
from service.image.json_text import dump_json
from service.image.reading import MAX_TENSORS
from service.operations.schema.spec import validate

POOL: Final = DescriptorPool()
DESCRIPTORS: Final = Path(__file__).with_name("open_inference.binpb").read_bytes()
for file in FileDescriptorSet.FromString(DESCRIPTORS).file:
    POOL.Add(file)
SERVICE: Final = POOL.FindServiceByName("inference.GRPCInferenceService")
MAX_PROBLEM: Final = 4096
MAX_TEXT: Final = 2048
"""Characters of a problem document in metadata, and of a message: clients have limits on them."""
MORE_CALLS: Final = 64
"""Calls of a connection beyond `oip.max_calls`, for health checks and refusals."""
PING_MS: Final = 5000
"""Clients may send keepalive pings this often, with and without calls."""
MAX_FIELDS: Final = 1024
MAX_READ_BYTES: Final = 2**18
"""Outermost fields of a request, and its bytes beside raw tensors. The library reads some twenty
bytes in a microsecond, and nothing else happens meanwhile."""
RAW_CONTENTS: Final = 7 << 3 | 2
"""The tag of raw tensors."""


def message(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def read_message(name: str, data: bytes) -> Any:
    """Raises MalformedBody."""
    try:
        if len(data) > MAX_READ_BYTES:
            check_fields(data)
        return message(name).FromString(data)
    except (DecodeError, IndexError) as error:
        raise MalformedBody(f"not a message {name}: {error}") from None


def check_fields(data: bytes) -> None:
    """Look at a long message before the library reads it. Raises MalformedBody, and IndexError
    where the data ends within a field."""
    at = num_fields = others = 0
    while at < len(data):
        tag, begin = varint(data, at)
        size, begin = varint(data, begin)
        end, num_fields = begin + size, num_fields + 1
        others += begin - at if tag == RAW_CONTENTS else end - at
        if num_fields > MAX_FIELDS or others > MAX_READ_BYTES or tag & 7 != 2:
            rule = f"at most {MAX_FIELDS} fields and {MAX_READ_BYTES} bytes beside raw tensors"
            raise MalformedBody(f"a message has {rule}: send tensors in raw_input_contents")
        at = end


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the first byte after it."""
    end = at
    while data[end] & 0x80 and end < at + 9:
        end += 1
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[at : end + 1])), end + 1


def read_request(data: bytes) -> Inference:
    """Raises MalformedBody, InvalidRequest, NotSupported, NoSuchRoute."""
    made = read_message("ModelInferRequest", data)
    model, raw = model_of(made.model_name, made.model_version), list(made.raw_input_contents)
    if len(made.inputs) > MAX_TENSORS:
        raise InvalidRequest("inputs", len(made.inputs), f"at most {MAX_TENSORS} tensors")
    if raw and len(raw) != len(made.inputs):
        rule = f"must be one for each of {len(made.inputs)} inputs, or none"
        raise InvalidRequest("raw_input_contents", f"{len(raw)} entries", rule)
    inputs = []
    for index, one in enumerate(made.inputs):
        given = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        given |= {"parameters": parameters_in(one), "data": raw[index] if raw else numbers_of(one)}
        if raw and one.HasField("contents"):
            rule = "must be given once: in contents or in raw_input_contents"
            raise InvalidRequest(f"{one.name}.contents", "given", rule)
        inputs.append(given)
    outputs = [{"name": one.name, "parameters": parameters_in(one)} for one in made.outputs]
    parameters = {"binary_data_output": True} | parameters_in(made)
    body = {"id": made.id, "parameters": parameters, "inputs": inputs, "outputs": outputs}
    return read_body(model, validate(RequestBody, body))


def numbers_of(given: Any) -> bytes | None:
    """The bytes of an input's `contents`; None for a datatype without a field there."""
    kind = re.sub(r"(?<=INT)(8|16|32)$", "", given.datatype).lower()
    values = getattr(given.contents, f"{kind}_contents", None)
    dtype = DTYPES_BY_DATATYPE.get(given.datatype)
    try:
        return None if values is None or dtype is None else np.array(values, dtype).tobytes()
    except OverflowError:
        rule = f"must be within the range of {given.datatype}"
        raise InvalidRequest(f"{given.name}.contents", "given", rule) from None


def parameters_in(made: Any) -> dict[str, Any]:
    """The parameters of a request, an input or an output."""
    kinds = {name: one.WhichOneof("parameter_choice") for name, one in made.parameters.items()}
    given = made.parameters
    return {name: getattr(given[name], kind) if kind else None for name, kind in kinds.items()}


def write_reply(response: Any, request: Inference, reply: EngineReply) -> None:
    response.model_name, response.model_version = request.model.name, VERSION
    for name, value in parameters_of(reply.fields).items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(response.parameters[name], f"{kind}_param", value)
    for output, array, _ in request.outputs_of(reply.arrays):
        response.outputs.add(**output)
        response.raw_output_contents.append(array.tobytes())


class GrpcService:
    """The methods, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def handlers(self) -> grpc.GenericRpcHandler:
        """Every method as one of streams, which is the same to clients: a key is checked, and has
        its place, before a message is received."""
        found = {}
        for method in SERVICE.methods:
            response = message(method.output_type.name)
            found[method.name] = grpc.stream_stream_rpc_method_handler(
                partial(self.serve, method), response_serializer=response.SerializeToString
            )
        return grpc.method_handlers_generic_handler(SERVICE.full_name, found)

    async def serve(self, method: Any, _: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        path = f"/{SERVICE.full_name}/{method.name}"
        begin = partial(GatewayRequest.begin, method.name, path, context.peer(), metadata.get)
        record = begin()
        try:
            await self.gateway.run(record, lambda: self.answer(record, begin, method, context))
        except RefusedRequest as refused:
            problem, document = refused.problem, dump_json(refused.problem)
            code = grpc.StatusCode[grpc_code(problem)]
            more = (("attnd-problem", document),) if len(document) <= MAX_PROBLEM else ()
            await context.abort(code, refused.text[:MAX_TEXT], (*record.trailing, *more))
        context.set_trailing_metadata(record.trailing)

    async def answer(self, record: GatewayRequest, begin: Any, method: Any, context: Any) -> None:
        """Write the response, or those of a stream, in the place that the key has."""
        name, made = method.name, message(method.output_type.name)
        if name in OPEN_METHODS:
            page = await self.gateway.page(name, "", "")
            await context.write(ParseDict(page, made(), ignore_unknown_fields=True))
            return
        keys = [value for key, value in context.invocation_metadata() if key == "authorization"]
        async with self.gateway.admitted(", ".join(keys)) as caller:
            seconds: float | None = self.gateway.settings.server.receive_timeout_s
            data = await self.receive(context, seconds)
            if name == "ModelStreamInfer":
                while data is not grpc.aio.EOF:
                    await context.write(await self.stream_one(begin(), caller, context, data))
                    data = await self.receive(context, None)
            elif data is grpc.aio.EOF:
                raise MalformedBody(f"{name} came without a message")
            elif name == "ModelInfer":
                response = made()
                await self.infer(record, caller, context, data, response)
                await context.write(response)
            else:
                asked = read_message(method.input_type.name, data)
                model, version = (getattr(asked, one, "") for one in ("name", "version"))
                page = await self.gateway.page(name, model, version)
                await context.write(ParseDict(page, made(), ignore_unknown_fields=True))

    async def stream_one(
        self, record: GatewayRequest, caller: Caller, context: Any, data: bytes
    ) -> Any:
        """The response to one request of a stream, which an error does not end."""
        response = message("ModelStreamInferResponse")()
        work = partial(self.infer, record, caller, context, data, response.infer_response)
        try:
            await self.gateway.run(record, work)
        except RefusedRequest as refused:
            response.error_message = refused.text
        return response

    async def receive(self, context: Any, seconds: float | None) -> Any:
        """The next message, or grpc.aio.EOF. Raises RequestTimeout, and NotReady on draining."""
        coming = asyncio.ensure_future(context.read())
        draining = asyncio.ensure_future(self.gateway.draining.wait())
        try:
            waiting = (coming, draining)
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            if draining.done():
                raise NotReady(DRAINING)
            raise RequestTimeout(f"no message came within server.receive_timeout_s = {seconds}")
        finally:
            coming.cancel()
            draining.cancel()

    async def infer(
        self, record: GatewayRequest, caller: Caller, context: Any, data: bytes, response: Any
    ) -> None:
        request, left = read_request(data), context.time_remaining()
        response.id = request.id
        deadline_s = None if left is None else min(max(left, 1e-6), 3600.0)
        reply = await self.gateway.infer(record, caller, request, deadline_s)
        write_reply(response, request, reply)


def make_server(gateway: Gateway) -> Any:
    """A server without ports. A second service on a port fails; idle connections are closed."""
    limits, oip = gateway.settings.server, gateway.settings.oip
    most, spare = descriptors()
    options = {
        "so_reuseport": 0,
        "max_receive_message_length": oip.max_message_bytes,
        "max_send_message_length": -1,
        "max_metadata_size": limits.max_header_bytes,
        "max_concurrent_streams": oip.max_calls + MORE_CALLS,
        "max_connection_idle_ms": min(int(limits.idle_timeout_s * 1e3) + 1, 2**31 - 1),
        "max_allowed_incoming_connections": min(most - spare, 2**31 - 1),
        "compression_enabled_algorithms_bitset": 1,  # none: 64 KB of gzip can be 64 MB
        "server_handshake_timeout_ms": int(HANDSHAKE_S * 1e3),
        "keepalive_permit_without_calls": 1,
        "http2.min_ping_interval_without_data_ms": PING_MS,
    }
    server = grpc.aio.server(options=[(f"grpc.{name}", value) for name, value in options.items()])
    server.add_generic_rpc_handlers((GrpcService(gateway).handlers(),))
    return server
