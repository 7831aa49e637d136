"""Reads a .proto file into protobuf's own description of it.

What is read is what such a file of plain messages needs: messages, enums, services, oneofs and
maps, in proto3. Anything else is a ValueError with the word that was met.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

TOKEN: Final = re.compile(r'//[^\n]*|"[^"\n]*"|[\w.]+|[{}()<>=;,]|\S')
SCALARS: Final = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "uint64", "int32", "bool", "string", "bytes", "uint32")
}
REPEATED: Final = FieldDescriptorProto.LABEL_REPEATED
SINGLE: Final = FieldDescriptorProto.LABEL_OPTIONAL


def read_proto(text: str, name: str) -> FileDescriptorProto:
    """The file `name` with that text."""
    return Reader(text).file(name)


class Reader:
    """The words of one file, read from front to back."""

    def __init__(self, text: str) -> None:
        words = (found[0] for found in TOKEN.finditer(text))
        self.words: Iterator[str] = (word for word in words if not word.startswith("//"))
        self.ahead = next(self.words, "")
        self.package = ""

    def word(self, expected: str = "") -> str:
        """The next word, which may have to be a certain one."""
        found, self.ahead = self.ahead, next(self.words, "")
        if not found or (expected and found != expected):
            raise ValueError(f"{found or 'the end'!r} where {expected or 'a word'!r} is expected")
        return found

    def skip(self, *expected: str) -> None:
        for word in expected:
            self.word(word)

    def until_closed(self) -> Iterator[str]:
        """The first word of each statement between braces."""
        self.word("{")
        while self.ahead != "}":
            yield self.word()
        self.word("}")

    def file(self, name: str) -> FileDescriptorProto:
        self.skip("syntax", "=", '"proto3"', ";", "package")
        self.package = self.word()
        self.word(";")
        found = FileDescriptorProto(name=name, package=self.package, syntax="proto3")
        while self.ahead:
            match self.word():
                case "message":
                    self.message(found.message_type.add())
                case "enum":
                    self.enum(found.enum_type.add())
                case "service":
                    self.service(found.service.add())
                case other:
                    raise ValueError(f"{other!r} is no message, enum or service")
        settle(found)
        return found

    def message(self, into: DescriptorProto) -> None:
        into.name = self.word()
        for first in self.until_closed():
            match first:
                case "message":
                    self.message(into.nested_type.add())
                case "oneof":
                    into.oneof_decl.add(name=self.word())
                    for kind in self.until_closed():
                        field = self.field(into, kind, SINGLE)
                        field.oneof_index = len(into.oneof_decl) - 1
                case "map":
                    self.map(into)
                case "repeated":
                    self.field(into, self.word(), REPEATED)
                case kind:
                    self.field(into, kind, SINGLE)

    def field(self, into: DescriptorProto, kind: str, label: Any) -> FieldDescriptorProto:
        """A field whose type has been read."""
        field = into.field.add(name=self.word(), label=label)
        self.word("=")
        field.number = int(self.word())
        self.word(";")
        name_type(field, kind)
        return field

    def map(self, into: DescriptorProto) -> None:
        """A map is a list of entries, each a message of key and value."""
        self.word("<")
        key = self.word()
        self.word(",")
        value = self.word()
        self.word(">")
        name = "".join(part.capitalize() for part in self.ahead.split("_")) + "Entry"
        entry = into.nested_type.add(name=name)
        entry.options.map_entry = True
        name_type(entry.field.add(name="key", number=1, label=SINGLE), key)
        name_type(entry.field.add(name="value", number=2, label=SINGLE), value)
        self.field(into, name, REPEATED)

    def enum(self, into: EnumDescriptorProto) -> None:
        into.name = self.word()
        for name in self.until_closed():
            self.word("=")
            into.value.add(name=name, number=int(self.word()))
            self.word(";")

    def service(self, into: ServiceDescriptorProto) -> None:
        into.name = self.word()
        for first in self.until_closed():
            if first != "rpc":
                raise ValueError(f"{first!r} where 'rpc' is expected")
            method = into.method.add(name=self.word())
            method.client_streaming, method.input_type = self.side()
            self.word("returns")
            method.server_streaming, method.output_type = self.side()
            self.skip("{", "}")

    def side(self) -> tuple[bool, str]:
        """One side of an rpc: whether it streams, and what."""
        self.word("(")
        name = self.word()
        streams = name == "stream"
        if streams:
            name = self.word()
        self.word(")")
        return streams, f".{self.package}.{name}"


def name_type(field: FieldDescriptorProto, kind: str) -> None:
    """A scalar's number, or the name of a message or enum, which `settle` completes."""
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type_name = kind


def settle(file: FileDescriptorProto) -> None:
    """Give every named type its full name: that of the nearest message around which has it."""
    enums = {f".{file.package}.{one.name}" for one in file.enum_type}
    known = set(enums)

    def gather(message: DescriptorProto, scope: str) -> None:
        known.add(f"{scope}.{message.name}")
        for one in message.nested_type:
            gather(one, f"{scope}.{message.name}")

    def complete(message: DescriptorProto, scope: str) -> None:
        inside = f"{scope}.{message.name}"
        for field in message.field:
            if field.type_name:
                field.type_name = found = find(field.type_name, inside)
                is_enum = found in enums
                field.type = field.TYPE_ENUM if is_enum else field.TYPE_MESSAGE
        for one in message.nested_type:
            complete(one, inside)

    def find(name: str, scope: str) -> str:
        while scope:
            if f"{scope}.{name}" in known:
                return f"{scope}.{name}"
            scope = scope.rpartition(".")[0]
        raise ValueError(f"no message or enum {name!r}")

    for one in file.message_type:
        gather(one, f".{file.package}")
    for one in file.message_type:
        complete(one, f".{file.package}")
