"""gRPC messages are read in little time, whatever is in them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from config.settings import ServerSettings
from service.doors.grpc.rpc import MAX_PROBES, Admission
from service.doors.grpc.tensors import (
    MAX_FIELDS,
    MAX_READ_BYTES,
    NUMBERS_AT_ONCE,
    decoder,
    message,
    read_infer_request,
    reading_request,
)
from service.doors.kit.ledger import Ledger
from service.doors.oip.models import MODELS
from service.doors.oip.request import MAX_TEXT
from service.errors import InvalidRequest, MalformedBody
from service.image.json_text import finish
from service.image.reading import MAX_VALUES
from service.metrics import Metrics

TOO_MANY = MAX_FIELDS + 1


def request(**fields: Any) -> Any:
    return message("ModelInferRequest")(**fields)


def with_parameters(tensor: Any) -> None:
    for number in range(TOO_MANY):
        tensor.parameters[str(number)].bool_param = True


def many_outputs(into: Any) -> None:
    for _ in range(TOO_MANY):
        into.outputs.add()


def many_in_an_input(into: Any) -> None:
    with_parameters(into.inputs.add())


def many_in_an_output(into: Any) -> None:
    with_parameters(into.outputs.add())


def many_elements(into: Any) -> None:
    into.inputs.add().contents.bytes_contents.extend([b""] * TOO_MANY)


@pytest.mark.parametrize(
    "fill",
    [with_parameters, many_outputs, many_in_an_input, many_in_an_output, many_elements],
    ids=lambda one: one.__name__,
)
def test_a_message_of_many_fields_is_refused_before_it_is_read(fill: Any) -> None:
    given = request(model_name="decode")
    fill(given)
    with pytest.raises(MalformedBody, match=f"more than {MAX_FIELDS} fields"):
        read_infer_request(given.SerializeToString())
    with pytest.raises(MalformedBody):
        decoder("ServerMetadataRequest")(given.SerializeToString() * TOO_MANY)


@pytest.mark.parametrize("end", [b"\x3a\xff", b"\x3a" + b"\xff" * 20, b"\x07\x07", b"\xff"])
def test_a_message_that_is_cut_off_or_wrong_is_malformed(end: bytes) -> None:
    long = request(raw_input_contents=[bytes(4 * MAX_FIELDS)]).SerializeToString()
    assert read_infer_request(long).raw_input_contents == [bytes(4 * MAX_FIELDS)]
    with pytest.raises(MalformedBody):
        read_infer_request(long + end)


def long_shape(into: Any) -> None:
    into.inputs.add(name="q", shape=[1] * (MAX_READ_BYTES + 1))


def many_integers(into: Any) -> None:
    into.inputs.add().contents.uint_contents.extend([1] * (MAX_READ_BYTES + 1))


def long_text(into: Any) -> None:
    into.parameters["id"].string_param = "x" * (MAX_READ_BYTES + 1)


def long_name(into: Any) -> None:
    into.model_name = "x" * (MAX_READ_BYTES + 1)


@pytest.mark.parametrize("fill", [long_shape, many_integers, long_text, long_name])
@pytest.mark.parametrize("end", [b"", b"\x3a\xff"], ids=["whole", "cut off"])
def test_a_message_that_takes_long_to_read_is_refused_before(fill: Any, end: bytes) -> None:
    given = request()
    fill(given)
    data = given.SerializeToString() + end
    with pytest.raises(MalformedBody, match=f"at most {MAX_READ_BYTES}: send tensors in raw"):
        read_infer_request(data)
    with pytest.raises(MalformedBody, match=f"at most {MAX_READ_BYTES}"):
        decoder("ModelMetadataRequest")(data)


def test_tensors_that_are_copied_as_they_are_may_be_longer() -> None:
    floats = np.ones(MAX_READ_BYTES // 4 + 1, np.float32)
    given = request(raw_input_contents=[bytes(MAX_READ_BYTES + 1)])
    given.inputs.add().contents.fp32_contents.extend(floats.tolist())
    assert read_infer_request(given.SerializeToString()) == given


def test_numbers_are_converted_in_pieces() -> None:
    rows = 2 * NUMBERS_AT_ONCE + 1
    given = request(model_name="append")
    numbers = np.random.default_rng(0).integers(0, 100, rows)
    one = given.inputs.add(name="token_ids", datatype="UINT32", shape=[rows])
    one.contents.uint_contents.extend(numbers.tolist())
    pieces = reading_request(MODELS["match_prefix"], given)
    assert [next(pieces), next(pieces)] == [None, None]
    call = finish(pieces)
    assert np.array_equal(np.frombuffer(call.tensors[0].data, np.uint32), numbers)


@pytest.mark.parametrize("rank", [9, 100_000])
def test_a_shape_of_many_dimensions_is_refused(rank: int) -> None:
    given = request(model_name="append")
    given.inputs.add(name="k", datatype="FP32", shape=[1] * rank)
    with pytest.raises(InvalidRequest) as caught:
        finish(reading_request(MODELS["append"], given))
    assert "at most 8 counts" in caught.value.rule and len(str(caught.value)) < 200


def test_a_parameter_of_many_values_is_refused_before_it_is_read() -> None:
    given = request(model_name="append")
    given.parameters["sequences"].string_param = "[" + "," * (MAX_VALUES + 1) + "]"
    with pytest.raises(InvalidRequest, match="at most 262144 values"):
        finish(reading_request(MODELS["append"], given))


def test_parameters_are_read_in_pieces_and_have_a_limit_together() -> None:
    half = "[" + "1," * (MAX_VALUES // 2 + 1) + "1]"
    given = request(model_name="prefill")
    given.parameters["offsets"].string_param = half
    pieces = reading_request(MODELS["prefill"], given)
    assert [next(pieces) for _ in range(3)] == [None] * 3
    given.parameters["qo_indptr"].string_param = half
    with pytest.raises(InvalidRequest, match="at most 262144 values together"):
        finish(reading_request(MODELS["prefill"], given))


def test_a_long_text_is_refused_before_it_is_escaped() -> None:
    given = request(model_name="get_sequence")
    given.parameters["id"].string_param = "\0" * (MAX_TEXT + 1)
    with pytest.raises(InvalidRequest, match="id = 4097 characters: must have at most 4096"):
        finish(reading_request(MODELS["get_sequence"], given))


async def test_the_oldest_probe_ends_where_too_many_clients_do_not_read() -> None:
    admission = Admission(ServerSettings(), None, Ledger(Metrics()), frozenset())

    async def probe() -> None:
        admission.probe_came()
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(probe()) for _ in range(MAX_PROBES + 2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True] * 2 + [False] * MAX_PROBES
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not admission.probes
