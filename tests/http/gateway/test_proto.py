"""The gateway's descriptors: the names and numbers of the standard and of the .proto file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2

from service.gateway import grpc_server
from service.gateway.grpc_server import POOL, SERVICE

FIELD = re.compile(r"^ +(?:repeated )?(?:map<.*>|[\w.]+) (\w+) = (\d+);", re.M)
RPC = re.compile(r"rpc (\w+)\(")


def all_messages(file: Any) -> Iterator[Any]:
    for one in file.message_types_by_name.values():
        yield one
        yield from one.nested_types


def shape(field: Any) -> tuple[Any, ...]:
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
            assert shape(field) == shape(standard[field.name]), (ours.full_name, field.name)
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


def test_the_descriptors_are_made_of_the_proto() -> None:
    proto = Path(grpc_server.__file__).with_name("open_inference.proto")
    text = proto.read_text(encoding="utf-8")
    file = POOL.FindFileByName("open_inference.proto")
    maps = [one for one in all_messages(file) if one.GetOptions().map_entry]
    values = [one for enum in file.enum_types_by_name.values() for one in enum.values]
    fields = [
        one for message in all_messages(file) if message not in maps for one in message.fields
    ]
    named = sorted([(one.name, one.number) for one in (*fields, *values)])
    in_text = [(name, int(number)) for name, number in FIELD.findall(text)]
    enums = re.findall(r"^  (\w+) = (\d+);", text, re.M)
    assert sorted([*in_text, *((name, int(number)) for name, number in enums)]) == named
    assert RPC.findall(text) == [one.name for one in SERVICE.methods]
