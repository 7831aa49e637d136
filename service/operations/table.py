"""The table of all operations: by name, and by the number that the road's frames carry."""

from __future__ import annotations

from typing import Final

from service.operations import (
    attention,
    events,
    prefix,
    records,
    rows,
    sequences,
    status,
    transfer,
)
from service.operations.schema.spec import Operation

MODULES: Final = (attention, events, prefix, records, rows, sequences, status, transfer)
BY_NUMBER: Final = {
    declared.number: declared
    for module in MODULES
    for declared in vars(module).values()
    if isinstance(declared, Operation)
}
OPERATIONS: Final = tuple(BY_NUMBER[number] for number in sorted(BY_NUMBER))
BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}
