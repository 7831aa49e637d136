"""Operations as models of the protocol, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from service import __version__
from service.doors.oip.datatypes import DATATYPES
from service.errors import NoSuchRoute
from service.image.json_text import dump_json
from service.operations.schema.spec import Operation, TensorSpec
from service.operations.table import OPERATIONS

VERSION: Final = "1"
"""The only version of every model."""
PLATFORM: Final = "attnd"
EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
INDEX_DATATYPE: Final = "INT32"
NUMBERED: Final = "{i}"
"""A number in an output's name: the request determines how many outputs there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One operation as a model.

    `inputs` are the names of its inputs with the datatypes that each may have; `list_fields`
    are fields that may come as inputs too, `text_fields` fields that are strings.
    """

    operation: Operation
    inputs: Mapping[str, tuple[str, ...]]
    fields: frozenset[str]
    text_fields: frozenset[str]
    list_fields: frozenset[str]

    @property
    def name(self) -> str:
        return self.operation.name


def make_model(operation: Operation) -> Model:
    properties = operation.fields.model_json_schema().get("properties", {})
    inputs = {spec.name: datatypes(spec) for spec in operation.takes}
    counts = {name for name, schema in properties.items() if is_list_of_counts(schema)}
    lists = frozenset(counts - inputs.keys())
    return Model(
        operation,
        inputs | {name: (INDEX_DATATYPE,) for name in properties if name in lists},
        frozenset(properties),
        frozenset(name for name, schema in properties.items() if is_text(schema)),
        lists,
    )


def choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives in a field's schema."""
    return list(schema.get("anyOf", [schema]))


def is_text(schema: Mapping[str, Any]) -> bool:
    return any(one.get("type") == "string" for one in choices(schema))


def is_list_of_counts(schema: Mapping[str, Any]) -> bool:
    return any(one.get("items", {}).get("type") == "integer" for one in choices(schema))


def datatypes(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(DATATYPES[name] for name in spec.dtypes)


MODELS: Final = {operation.name: make_model(operation) for operation in OPERATIONS}


def model_of(name: str, version: str = "") -> Model:
    """The model of that name. Raises NoSuchRoute."""
    model = MODELS.get(name)
    if model is None:
        raise NoSuchRoute(f"no model {name[:100]!r}: the models are {', '.join(MODELS)}")
    if version not in ("", VERSION):
        raise NoSuchRoute(f"no version {version[:100]!r} of {name}: the only one is {VERSION}")
    return model


def error_text(problem: Mapping[str, Any]) -> str:
    """A problem document as the one string that the protocol's clients show."""
    return f"{problem['code']}: {problem['detail']}"


def server_metadata() -> dict[str, Any]:
    return {"name": "attnd", "version": __version__, "extensions": list(EXTENSIONS)}


def metadata(model: Model) -> dict[str, Any]:
    """A model's inputs and outputs, each with its first datatype."""
    operation = model.operation
    inputs = [tensor(spec) for spec in operation.takes] + [
        {"name": name, "datatype": INDEX_DATATYPE, "shape": [-1]} for name in lists(model)
    ]
    outputs = [tensor(spec) for spec in operation.gives if NUMBERED not in spec.name]
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": outputs,
    }


def tensor(spec: TensorSpec) -> dict[str, Any]:
    """One input or output; a dimension without a fixed size is -1."""
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": datatypes(spec)[0], "shape": shape}


def lists(model: Model) -> list[str]:
    """The fields that may come as inputs, in the order of their declaration."""
    return [name for name in model.inputs if name in model.list_fields]


def config(model: Model) -> dict[str, Any]:
    """A model's metadata with its optional inputs; `parameters` has each tensor's datatypes and
    the JSON schema of the fields."""
    found = metadata(model)
    required = {spec.name for spec in model.operation.takes if not spec.optional}
    specs = (*model.operation.takes, *model.operation.gives)
    known = dump_json({spec.name: datatypes(spec) for spec in specs})
    schema = dump_json(model.operation.fields.model_json_schema())
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [
            configured(one) | {"optional": one["name"] not in required} for one in found["inputs"]
        ],
        "output": [configured(one) for one in found["outputs"]],
        "parameters": {
            "datatypes": {"string_value": known},
            "fields": {"string_value": schema},
        },
    }


def configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    datatype = f"TYPE_{tensor['datatype']}"
    return {"name": tensor["name"], "data_type": datatype, "dims": tensor["shape"]}


def index(state: tuple[str, str]) -> list[dict[str, Any]]:
    """Every model and whether it is ready; `state` is the engine's state and its reason."""
    is_ready = state[0] == "ready"
    state_of_all = {"version": VERSION, "state": "READY" if is_ready else "UNAVAILABLE"}
    reason = "" if is_ready else state[1]
    return [{"name": name, **state_of_all, "reason": reason} for name in MODELS]
