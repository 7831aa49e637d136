"""Errors for callers: the core's refusals as errors of the service."""

from __future__ import annotations

import logging
from typing import Any, Final

from kernels.errors import NoMemory, Unsupported
from service import errors
from service.core.errors import CoreError
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
    match error:
        case errors.AttndError():
            return error
        case CoreError():
            kind: type[errors.AttndError] = getattr(errors, type(error).__name__)
            return kind(**{name: named(value, tenant) for name, value in vars(error).items()})
        case Unsupported():
            return errors.InvalidRequest(error.field, named(error.value, tenant), error.rule)
        case NoMemory():
            return errors.Overloaded(str(error), retry_after_s=1.0)
    return None


def named(value: Any, tenant: Tenant) -> Any:
    """A member of an error, with sequences named as their callers name them."""
    match value:
        case str():
            return tenant.shown(value)
        case list() | tuple():
            return [named(one, tenant) for one in value]
        case dict():
            return {named(key, tenant): one for key, one in value.items()}
    return value
