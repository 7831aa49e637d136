"""Operations as models of the protocol, and their metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from attnd.wire.dtypes import DTYPES

from service import __version__
from service.errors import NoSuchRoute
from service.image.json_text import dump_json
from service.operations.schema.spec import Operation, TensorSpec
from service.operations.table import OPERATIONS

VERSION: Final = "1"
"""The only version of every model."""
NUMBERED: Final = "{i}"
"""A number in an output's name: the request determines how many outputs there are."""
SERVER: Final = {
    "name": "attnd",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_configuration", "model_repository"],
}


def datatype_of(dtype: str) -> str:
    """`FP16` of `F16`. The protocol has no fp8: `FP8_E4M3` and `FP8_E5M2` are attnd's own."""
    if dtype in ("BF16", "BOOL"):
        return dtype
    return {"F": "FP", "I": "INT", "U": "UINT"}[dtype[0]] + dtype[1:]


DTYPES_BY_DATATYPE: Final = {datatype_of(name): dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One operation. `spelled` are fields that are JSON where they come as strings: all but texts;
    `lists` are lists of integers, which may come as INT32 inputs too."""

    operation: Operation
    schema: dict[str, Any]
    spelled: frozenset[str]
    lists: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.operation.name

    def metadata(self) -> dict[str, Any]:
        """Inputs and outputs, each with its first datatype; -1 is a dimension of any size."""
        takes, gives = self.operation.takes, self.operation.gives
        lists = [{"name": name, "datatype": "INT32", "shape": [-1]} for name in self.lists]
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": "attnd",
            "inputs": [*map(tensor_of, takes), *lists],
            "outputs": [tensor_of(spec) for spec in gives if NUMBERED not in spec.name],
        }

    def config(self) -> dict[str, Any]:
        """The metadata in the form of a configuration, with optional inputs; `parameters` has each
        tensor's datatypes and the JSON schema of the fields."""
        found, specs = self.metadata(), (*self.operation.takes, *self.operation.gives)
        required = {spec.name for spec in specs if not spec.optional}
        known = {spec.name: [datatype_of(one) for one in spec.dtypes] for spec in specs}
        given = {"datatypes": known, "fields": self.schema}
        tensors = [
            {"name": one["name"], "data_type": f"TYPE_{one['datatype']}", "dims": one["shape"]}
            for one in (*found["inputs"], *found["outputs"])
        ]
        count = len(found["inputs"])
        return {
            "name": self.name,
            "platform": "attnd",
            "backend": "attnd",
            "max_batch_size": 0,
            "input": [one | {"optional": one["name"] not in required} for one in tensors[:count]],
            "output": tensors[count:],
            "parameters": {name: {"string_value": dump_json(one)} for name, one in given.items()},
        }


def tensor_of(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": datatype_of(spec.dtypes[0]), "shape": shape}


def make_model(operation: Operation) -> Model:
    schema = operation.fields.model_json_schema()
    tensors = {spec.name for spec in operation.takes}
    properties, lists = schema.get("properties", {}), []
    spelled = set(properties)
    for name, field in properties.items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") == "string":
                spelled.discard(name)
            elif kind.get("items", {}).get("type") == "integer" and name not in tensors:
                lists.append(name)
    return Model(operation, schema, frozenset(spelled), tuple(lists))


MODELS: Final = {operation.name: make_model(operation) for operation in OPERATIONS}


def model_of(name: str, version: str = "") -> Model:
    """The model of that name. Raises NoSuchRoute."""
    model = MODELS.get(name)
    if model is None:
        raise NoSuchRoute(f"no model {name[:100]!r}: the models are {', '.join(MODELS)}")
    if version not in ("", VERSION):
        raise NoSuchRoute(f"no version {version[:100]!r} of {name}: the only one is {VERSION}")
    return model
