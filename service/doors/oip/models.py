"""Operations as models of the protocol, and their metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attnd.wire.dtypes import DTYPES, DType

from service import __version__
from service.errors import NoSuchRoute
from service.image.json_text import dump_json
from service.metrics import Metrics
from service.operations.schema.spec import Operation, TensorSpec
from service.operations.table import OPERATIONS

DATATYPES: Final = {
    "F64": "FP64",
    "F32": "FP32",
    "F16": "FP16",
    "BF16": "BF16",
    "F8_E4M3": "FP8_E4M3",  # the protocol has no FP8: these two names are the project's own
    "F8_E5M2": "FP8_E5M2",
    "I64": "INT64",
    "I32": "INT32",
    "I16": "INT16",
    "I8": "INT8",
    "U64": "UINT64",
    "U32": "UINT32",
    "U16": "UINT16",
    "U8": "UINT8",
    "BOOL": "BOOL",
}
DTYPES_BY_DATATYPE: Final[dict[str, DType]] = {
    datatype: DTYPES[name] for name, datatype in DATATYPES.items()
}


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
    return Model(operation, inputs, frozenset(properties), frozenset(texts), frozenset(lists))


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
        "parameters": {"datatypes": {"string_value": known}, "fields": {"string_value": schema}},
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


UNCOUNTED: Final = ("queue", "compute_input", "compute_infer", "compute_output")
"""Durations that the protocol's tools expect."""


def statistics(models: Iterable[Model], metrics: Metrics) -> list[dict[str, Any]]:
    """The calls of each model, over all doors: the number of successes, with the time of all
    calls, and the number of errors. Other durations are not counted by model, and are 0."""
    sums = metrics.sums(metrics.processes())
    succeeded: dict[str, int] = {}
    failed: dict[str, int] = {}
    for (metric, *labels), block in sums.items():
        if metric == "requests":
            op, code = labels
            counts = succeeded if code == "ok" else failed
            counts[op] = counts.get(op, 0) + int(block[0])
    found = []
    for model in models:
        count = succeeded.get(model.name, 0)
        seconds = sums.get(("request_duration_seconds", model.name), [0.0])[-1]
        of_all = {
            "success": {"count": count, "ns": round(seconds * 1e9)},
            "fail": {"count": failed.get(model.name, 0), "ns": 0},
            **{duration: {"count": 0, "ns": 0} for duration in UNCOUNTED},
        }
        counts = {"inference_count": count, "execution_count": count}
        found.append({"name": model.name, "version": VERSION, **counts, "inference_stats": of_all})
    return found
