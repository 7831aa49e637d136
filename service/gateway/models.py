"""Operations as models of the protocol, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping
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
INDEX_DATATYPE: Final = "INT32"
NUMBERED: Final = "{i}"
"""A number in an output's name: the request determines how many outputs there are."""
SERVER: Final = {
    "name": "attnd",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
}


def datatype_of(dtype: str) -> str:
    """`FP16` of `F16`. The protocol has no fp8: `FP8_E4M3` and `FP8_E5M2` are attnd's own."""
    if dtype in ("BF16", "BOOL"):
        return dtype
    return {"F": "FP", "I": "INT", "U": "UINT"}[dtype[0]] + dtype[1:]


DTYPES_BY_DATATYPE: Final = {datatype_of(name): dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One operation. `inputs` are names with the datatypes that each may have; `list_fields` are
    fields that may come as inputs too, `text_fields` fields that are strings."""

    operation: Operation
    inputs: Mapping[str, tuple[str, ...]]
    fields: frozenset[str]
    text_fields: frozenset[str]
    list_fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.operation.name


def make_model(operation: Operation) -> Model:
    inputs = {spec.name: datatypes(spec) for spec in operation.takes}
    properties = operation.fields.model_json_schema().get("properties", {})
    texts, lists = set(), []
    for name, schema in properties.items():
        for kind in schema.get("anyOf", [schema]):
            if kind.get("type") == "string":
                texts.add(name)
            elif kind.get("items", {}).get("type") == "integer" and name not in inputs:
                lists.append(name)
    inputs |= dict.fromkeys(lists, (INDEX_DATATYPE,))
    return Model(operation, inputs, frozenset(properties), frozenset(texts), tuple(lists))


def datatypes(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(map(datatype_of, spec.dtypes))


MODELS: Final = {operation.name: make_model(operation) for operation in OPERATIONS}


def model_of(name: str, version: str = "") -> Model:
    """The model of that name. Raises NoSuchRoute."""
    model = MODELS.get(name)
    if model is None:
        raise NoSuchRoute(f"no model {name[:100]!r}: the models are {', '.join(MODELS)}")
    if version not in ("", VERSION):
        raise NoSuchRoute(f"no version {version[:100]!r} of {name}: the only one is {VERSION}")
    return model


def metadata(model: Model) -> dict[str, Any]:
    """A model's inputs and outputs, each with its first datatype; -1 is a dimension of any size."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        shape = [size if isinstance(size, int) else -1 for size in spec.shape]
        return {"name": spec.name, "datatype": datatypes(spec)[0], "shape": shape}

    operation = model.operation
    lists = [
        {"name": name, "datatype": INDEX_DATATYPE, "shape": [-1]} for name in model.list_fields
    ]
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": "attnd",
        "inputs": [*map(tensor, operation.takes), *lists],
        "outputs": [tensor(spec) for spec in operation.gives if NUMBERED not in spec.name],
    }


def config(model: Model) -> dict[str, Any]:
    """A model's metadata with its optional inputs; `parameters` has each tensor's datatypes and
    the JSON schema of the fields."""

    def tensor(given: Mapping[str, Any], **more: bool) -> dict[str, Any]:
        kind = f"TYPE_{given['datatype']}"
        return {"name": given["name"], "data_type": kind, "dims": given["shape"], **more}

    found, operation = metadata(model), model.operation
    required = {spec.name for spec in operation.takes if not spec.optional}
    known = {spec.name: datatypes(spec) for spec in (*operation.takes, *operation.gives)}
    parameters = {"datatypes": known, "fields": operation.fields.model_json_schema()}
    return {
        "name": model.name,
        "platform": "attnd",
        "backend": "attnd",
        "max_batch_size": 0,
        "input": [tensor(one, optional=one["name"] not in required) for one in found["inputs"]],
        "output": [tensor(one) for one in found["outputs"]],
        "parameters": {
            key: {"string_value": dump_json(value)} for key, value in parameters.items()
        },
    }


def index(state: str, reason: str) -> list[dict[str, Any]]:
    """Every model and whether it is ready, by the state of the service."""
    how = {"state": "READY", "reason": ""}
    if state != "ready":
        how = {"state": "UNAVAILABLE", "reason": reason}
    return [{"name": name, "version": VERSION, **how} for name in MODELS]


@dataclass(slots=True)
class Tally:
    """Calls of one model: successes, with the seconds of all calls, and errors."""

    succeeded: int = 0
    failed: int = 0
    seconds: float = 0.0

    def add(self, succeeded: bool, seconds: float) -> None:
        self.succeeded += succeeded
        self.failed += not succeeded
        self.seconds += seconds

    def statistics(self, model: Model) -> dict[str, Any]:
        """In the protocol's form; durations that are not counted by model are 0."""
        names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        durations = {name: {"count": 0, "ns": 0} for name in names}
        durations["success"] = {"count": self.succeeded, "ns": round(self.seconds * 1e9)}
        durations["fail"]["count"] = self.failed
        counts = {"inference_count": self.succeeded, "execution_count": self.succeeded}
        return {"name": model.name, "version": VERSION, **counts, "inference_stats": durations}
