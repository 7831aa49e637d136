"""Models of the answers that `attnd.wire` declares, for their schemas."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from attnd.wire.answer_table import ANSWERS, TEXT, layout_of
from pydantic import BaseModel, Field, create_model

from service.operations.schema.fields import Fields

Natural = Annotated[int, Field(ge=0)]


@cache
def answer_of(operation: str) -> type[BaseModel] | None:
    """The model of an operation's answer; None: the answer has no members."""
    answer: Any = ANSWERS.get(operation)
    if answer is None or isinstance(answer, type):
        return None if answer is None else model_of(answer)
    name = "".join(map(str.title, operation.split("_")))
    members = {
        member: (type_of(hint), None if type(None) in get_args(hint) else ...)
        for member, hint in answer.items()
    }
    return make(f"{name}Answer", None, members)


@cache
def model_of(kind: Any) -> type[BaseModel]:
    """The JSON members of a class as a model, with the texts of its docstring."""
    text = inspect.getdoc(kind) or ""
    about = {name: " ".join(one.split()) for name, one in TEXT.findall(text)}
    defaults = {one.name: ... if one.default is MISSING else one.default for one in fields(kind)}
    members = {
        name: (type_of(hint), Field(defaults.get(name, ...), description=about.get(name)))
        for name, hint in layout_of(kind).all_members.items()
    }
    return make(kind.__name__, " ".join(TEXT.sub("", text).split()), members)


def make(name: str, text: str | None, members: Mapping[str, Any]) -> type[BaseModel]:
    made: type[BaseModel] = create_model(name, __base__=Fields, __doc__=text, **members)
    return made


def type_of(hint: Any) -> Any:
    """A member's type for a schema: counts are not negative, tuples and listed arrays are lists."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is int:
        return Natural
    if hasattr(hint, "__dataclass_fields__"):
        return model_of(hint)
    if origin is Annotated:
        return list[Natural]
    if origin in (UnionType, Union):
        return Union[tuple(map(type_of, inner))]  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[inner[0], type_of(inner[1])]  # type: ignore[valid-type, misc]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[type_of(inner[0])]  # type: ignore[misc]
    return hint
