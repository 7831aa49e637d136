"""What a caller is told when an operation fails: the core's refusals as errors of the service."""

from __future__ import annotations

from kernels.backend import Unsupported
from service import errors
from service.core import errors as core


def as_refusal(error: Exception) -> errors.AttndError | None:
    """The error as callers are to see it; None for one that is a bug."""
    match error:
        case errors.AttndError():
            return error
        case core.UnknownSequence():
            return errors.UnknownSequence(error.ids)
        case core.SequenceExists():
            return errors.SequenceExists(error.ids)
        case core.LengthMismatch():
            return errors.LengthMismatch(error.lengths)
        case core.OutOfPages():
            return errors.OutOfPages(error.needed, error.free, error.total)
        case core.InvalidRequest() | Unsupported():
            return errors.InvalidRequest(error.field, error.value, error.rule)
        case _:
            return None
