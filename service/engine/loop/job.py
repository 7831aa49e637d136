"""Jobs: operations from their arrival to their reply."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final

from kernels.errors import NoMemory, Unsupported
from service.core.errors import CoreError
from service.core.sequences.books import Watch
from service.core.values import Extension
from service.engine.work.request import Request
from service.engine.work.work import OpenedStep, Seconds, SlicedWork, Work
from service.errors import AttndError, Internal, InvalidRequest, Overloaded, without_frames
from service.tenants import OPEN, Tenant

LOG: Final = logging.getLogger("attnd.engine")


@dataclass(slots=True, eq=False)
class Job:
    """An operation from its arrival to its reply.

    `arrived` and `deadline` are `time.monotonic()`. `token` is the call to reply to. `alone`: its
    turn comes when nothing before it can be undone any more. `watch`: the sequences that must not
    change while its slices run. `stopped_by`: why its slices are being undone. While `is_unread`,
    the request has only its operation and tenant.
    """

    request: Request
    token: Any
    arrived: float
    deadline: float
    cancelled: bool = False
    alone: bool = False
    is_unread: bool = False
    seconds: Seconds = field(default_factory=Seconds)
    work: Work | None = None
    error: Exception | None = None
    watch: Watch | None = None
    stopped_by: Exception | None = None

    @property
    def extension(self) -> Extension | None:
        return None if self.work is None else self.work.extension

    @property
    def rows(self) -> Extension | None:
        """The rows that it adds, at once, in slices or in a step."""
        match self.work:
            case SlicedWork() | OpenedStep():
                return self.work.rows
        return self.extension


def refusal_of(job: Job, error: Exception) -> AttndError:
    """The error for a job's caller, with the caller's names of sequences. A bug is logged here,
    with its traceback."""
    tenant = OPEN if job.is_unread else job.request.tenant  # the caller's own names until then
    refusal: AttndError
    match error:
        case CoreError():
            refusal = type(error)(*named(error.args, tenant))
        case AttndError():
            refusal = error
        case Unsupported():
            refusal = InvalidRequest(error.field, named(error.value, tenant), error.rule)
        case NoMemory():
            refusal = Overloaded(str(error), retry_after_s=1.0)
        case _:
            name = job.request.operation.name
            LOG.error("%s failed: this is a bug", name, exc_info=error)
            text = f"{name} failed, and changed nothing; the log has the traceback"
            refusal = Internal(text)
    return without_frames(refusal)  # they would keep the job, and it the tensors


def named(value: Any, tenant: Tenant) -> Any:
    """Arguments of an error, with sequences named as their callers name them."""
    match value:
        case str():
            return tenant.shown(value)
        case list() | tuple():
            return [named(one, tenant) for one in value]
        case dict():
            return {named(key, tenant): one for key, one in value.items()}
    return value
