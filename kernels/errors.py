"""Errors of backends besides `ValueError`: unsupported requests, full or failed devices."""

from __future__ import annotations


class Unsupported(ValueError):
    """A valid request that this backend does not support; nothing was changed."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value}: {rule}")
        self.field, self.value, self.rule = field, value, rule


class NoMemory(RuntimeError):
    """The device has no memory for a call and cannot free any; the call can be repeated."""


class DeviceLost(RuntimeError):
    """The device failed: its pool is undefined and the process must be restarted."""
