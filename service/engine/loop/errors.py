"""Errors for callers: the core's refusals as errors of the service."""

from __future__ import annotations

import logging
from typing import Final

from kernels.errors import NoMemory, Unsupported
from service import errors
from service.core import errors as core
from service.engine.loop.job import Job
from service.tenants import Tenant

LOG: Final = logging.getLogger("attnd.engine")


def refusal_of(job: Job, error: Exception) -> Exception:
    """The error for a job's caller; a bug is logged here, with its traceback."""
    refusal = as_refusal(error, job.request.tenant)
    if refusal is not None:
        return refusal.with_traceback(None)  # its frames would keep the job, and it the tensors
    name = job.request.operation.name
    LOG.error("%s failed: this is a bug", name, exc_info=error)
    return errors.Internal(f"{name} failed, and changed nothing; the log has the traceback")


def as_refusal(error: Exception, tenant: Tenant) -> errors.AttndError | None:
    """The error for the tenant's callers; None for a bug."""
    shown = tenant.shown
    match error:
        case errors.AttndError():
            return error
        case core.UnknownSequence():
            return errors.UnknownSequence([shown(name) for name in error.ids])
        case core.SequenceExists():
            return errors.SequenceExists([shown(name) for name in error.ids])
        case core.LengthMismatch():
            return errors.LengthMismatch(
                {shown(name): held for name, held in error.lengths.items()}
            )
        case core.SequenceTaken():
            return errors.SequenceTaken(
                {shown(name): epoch for name, epoch in error.epochs.items()}
            )
        case core.OutOfPages():
            return errors.OutOfPages(
                error.needed, error.free, error.total, error.held, error.available
            )
        case core.UnknownLease():
            return errors.UnknownLease(error.lease)
        case core.UnknownPage():
            return errors.UnknownPage(error.key)
        case core.KeyMismatch():
            of = None if error.sequence is None else shown(error.sequence)
            return errors.KeyMismatch(error.page, error.rule, of)
        case core.InvalidRequest() | Unsupported():
            return errors.InvalidRequest(error.field, named(error.value, tenant), error.rule)
        case NoMemory():
            return errors.Overloaded(str(error), retry_after_s=1.0)
        case _:
            return None


def named(value: object, tenant: Tenant) -> object:
    """The value that an error is about, with sequences named as their callers name them."""
    match value:
        case str():
            return tenant.shown(value)
        case list():
            return [named(one, tenant) for one in value]
        case _:
            return value
