"""Operations on records: opaque blocks by key, which live in host memory and on disk alone."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from attnd.wire.bounds import MAX_RECORDS
from pydantic import Field

from service.operations.prefix import DEFAULT_LEASE_S, LeaseId, LeaseSeconds
from service.operations.schema.fields import Entries, Fields, InfoAnswer, NoFields, refuse
from service.operations.schema.spec import Operation, TensorSpec

MAX_KEY_BYTES: Final = 64
MAX_RECORD_BYTES: Final = 64 * 2**20

Stamp = Annotated[str, Field(min_length=1, max_length=256, examples=["org/model@5f0b02c fp16 tp1"])]
KEYS: Final = (
    TensorSpec("keys", ("U8",), ("K",), f"keys of 1 to {MAX_KEY_BYTES} bytes, back to back"),
    TensorSpec("key_lens", ("U8",), ("n",), f"bytes of each key, at most {MAX_RECORDS} keys"),
)
VALUES: Final = TensorSpec("values", ("U8",), ("V",), "the records' bytes, back to back")


class RecordFields(Fields):
    stamp: Stamp
    """What the bytes depend on beside the key: model and revision, dtype, layout, ranks. Records of
    equal keys and other stamps are other records."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        count = entries["key_lens"].shape[0]
        if not 1 <= count <= MAX_RECORDS:
            refuse("key_lens.shape", [count], f"1 to {MAX_RECORDS} keys a call: send more calls")


class ContainsFields(RecordFields):
    stop_at_miss: bool = False
    """Whether the reply ends with the first key that is not there."""
    job: LeaseId | None = None
    """Holds the records that are there for this job: they are not evicted until its release."""
    lease_s: LeaseSeconds = DEFAULT_LEASE_S
    """Seconds until the job's records are released in any case."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        super().check(entries, info)
        if self.job is not None and not self.lease_s:
            refuse("lease_s", self.lease_s, "must be above 0 with a job")


class PutFields(RecordFields):
    durable: bool = False
    """Whether the reply waits until the records are on disk, for most of the time to the
    deadline."""


class JobFields(Fields):
    """The job named by the path."""

    id: LeaseId


operation = partial(Operation, tag="records", routing="anywhere")

CONTAINS: Final = operation(
    name="contains_records",
    summary="Which records are there, and why others are not",
    fields=ContainsFields,
    takes=KEYS,
    scope="read",
)

PUT: Final = operation(
    name="put_records",
    summary="Store records",
    description="The reply comes once host memory has them. A record that is there keeps its "
    "bytes (`present`); one that finds no room within the deadline, or the namespace's limit, is "
    "not stored (`no_room`).",
    fields=PutFields,
    takes=(
        *KEYS,
        TensorSpec("sizes", ("I64",), ("n",), f"bytes of each record, 1 to {MAX_RECORD_BYTES}"),
        VALUES,
    ),
    scope="append",
)

GET: Final = operation(
    name="get_records",
    summary="Read records, verified",
    description="`values` has `num_bytes[i]` bytes for each key, in order: none for one that was "
    "not found, and zeros in place of a record that proved damaged.",
    fields=RecordFields,
    takes=KEYS,
    gives=(VALUES,),
    scope="read",
)

TOUCH: Final = operation(
    name="touch_records",
    summary="Make records the most recently used ones",
    fields=RecordFields,
    takes=KEYS,
    scope="read",
)

DELETE: Final = operation(
    name="delete_records",
    summary="Delete records",
    description="`found` was deleted. Files keep the bytes until others overwrite them.",
    fields=RecordFields,
    takes=KEYS,
    scope="append",
    frees=True,
)

CLEAR: Final = operation(
    name="clear_records",
    summary="Delete all records of the namespace, and overwrite their bytes in files",
    fields=NoFields,
    scope="append",
    frees=True,
    answer_text="Number of deleted records.",
)

RELEASE: Final = operation(
    name="release_records",
    summary="Release the records that a job holds",
    fields=JobFields,
    scope="read",
    frees=True,
    answer_text="Released, or the job holds none.",
)
