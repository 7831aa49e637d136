"""Operations that only a cluster's router sends to engines: claims and transfers of ownership."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from service.operations.schema.fields import Counts, Entries, Epoch, Fields, SequenceId, refuse
from service.operations.schema.info import InfoAnswer
from service.operations.schema.spec import Operation
from service.operations.sequences import ShardFields
from service.operations.transfer import MAX_IDLE_S, Generation, check_rank

DEFAULT_HAND_OVER_S: Final = 10.0


class ClaimFields(Fields):
    id: SequenceId
    epoch: Epoch
    """Later than the present one."""


class ClaimAnswer(Fields):
    epoch: Epoch
    """The one before."""
    lengths: Counts
    """kv_len per layer of the whole sequence, as far as this engine knows."""


class HandOverFields(Fields):
    id: SequenceId
    state: Literal["leaving", "handed", "gone", "back", "arrived"]
    """Next state of the transfer, or of a new sequence. `arrived` changes nothing: a 404 at an
    engine that has finished no import of `generation` lately."""
    generation: Generation | None = None
    """With `handed`: generation of the export that the other engine has; a 409 with the present one
    if it differs."""
    shard: ShardFields | None = None
    """With `leaving`, of a part of a sequence: the pages that are here, and leave."""
    epoch: Epoch | None = None
    """With `shard`: the epoch that the part is in."""
    for_s: Annotated[float, Field(gt=0.0, le=MAX_IDLE_S)] = DEFAULT_HAND_OVER_S
    """Seconds without a call or export after which a leaving sequence stays, and a handed one is
    deleted."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        state = self.state
        if (self.generation is not None) != (state in ("handed", "arrived")):
            rule = "goes with state = handed or arrived, and must be given then"
            refuse("generation", self.generation, rule)
        if (self.epoch is not None) != (self.shard is not None):
            refuse("epoch", self.epoch, "goes with shard, and must be given then")
        if self.shard is None:
            return
        check_rank(self.shard)
        if state != "leaving" or self.shard.ranks == 1:
            refuse("shard", "given", "goes with state = leaving, and is not all of it")


CLAIM: Final = Operation(
    name="claim",
    summary="Claim a shard: start a new epoch and reject writers of earlier ones",
    tag="sequences",
    fields=ClaimFields,
    answer=ClaimAnswer,
    scope="move",
    example={"epoch": 1},
)

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
