"""The .proto that the gRPC door reads: the standard's names and numbers, and a strict reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from service.doors.grpc.messages import POOL, SERVICE
from service.doors.grpc.proto import read_proto

HEAD = 'syntax = "proto3"; package p;'


def all_messages(file: Any) -> Iterator[Any]:
    for one in file.message_types_by_name.values():
        yield one
        yield from one.nested_types


def told(field: Any) -> tuple[Any, ...]:
    of = field.message_type or field.enum_type
    return field.number, field.type, field.is_repeated, of.full_name if of else None


def test_every_message_is_the_standards() -> None:
    theirs = {
        one.full_name: one
        for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)
        for one in all_messages(file)
    }
    for ours in all_messages(POOL.FindFileByName("open_inference.proto")):
        standard = theirs[ours.full_name].fields_by_name
        for field in ours.fields:
            assert told(field) == told(standard[field.name]), (ours.full_name, field.name)
            choice = field.containing_oneof
            assert (choice and choice.name) == (
                standard[field.name].containing_oneof and "parameter_choice"
            )


def test_every_method_is_the_standards() -> None:
    standard = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for ours in SERVICE.methods:
        one = standard[ours.name]
        assert ours.input_type.full_name == one.input_type.full_name
        assert ours.output_type.full_name == one.output_type.full_name
        assert (ours.client_streaming, ours.server_streaming) == (
            one.client_streaming,
            one.server_streaming,
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('syntax = "proto2"; package p;', "'\"proto2\"' where '\"proto3\"' is expected"),
        (f"{HEAD} option x = 1;", "'option' is no message, enum or service"),
        (f"{HEAD} message A {{ int32 a = 1;", "'the end' where 'a word' is expected"),
        (f"{HEAD} message A {{ int32 a 1; }}", "'1' where '=' is expected"),
        (f"{HEAD} message A {{ B b = 1; }}", "no message or enum 'B'"),
        (f"{HEAD} message A {{ int32 a = x; }}", "invalid literal"),
        (f"{HEAD} service S {{ get A(B); }}", "'get' where 'rpc' is expected"),
    ],
)
def test_what_the_reader_does_not_know_it_refuses(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        read_proto(text, "x.proto")
    assert words in str(refused.value)
