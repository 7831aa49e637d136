"""The operation that only a cluster's router sends to engines: transfers of ownership."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from service.operations.schema.fields import Entries, Fields, SequenceId, refuse
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation
from service.operations.transfer import MAX_IDLE_S, Generation

DEFAULT_HAND_OVER_S: Final = 10.0


class HandOverFields(Fields):
    id: SequenceId
    state: Literal["leaving", "handed", "gone", "back", "arrived"]
    """Next state of the transfer, or of a new sequence. `arrived` changes nothing: a 404 at an
    engine that has finished no import of `generation` lately."""
    generation: Generation | None = None
    """With `handed`: generation of the export that the other engine has; a 409 with the present one
    if it differs."""
    for_s: Annotated[float, Field(gt=0.0, le=MAX_IDLE_S)] = DEFAULT_HAND_OVER_S
    """Seconds without a call or export after which a leaving sequence stays, and a handed one is
    deleted."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        state = self.state
        if (self.generation is not None) != (state in ("handed", "arrived")):
            rule = "goes with state = handed or arrived, and must be given then"
            refuse("generation", self.generation, rule)


HAND_OVER: Final = Operation(
    name="hand_over",
    summary="Transfer the ownership of a sequence to another engine",
    description="`leaving` first: from then on it can only be exported. `handed` once the other "
    "engine has all of it: from then on it cannot return by timeout. `gone` deletes it here, "
    "`back` keeps it; so they do with a new sequence that waits for its confirmation.",
    tag="transfer",
    fields=HandOverFields,
    scope="move",
    answer_text="Done.",
    example={"state": "leaving"},
)
