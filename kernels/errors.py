"""What backends raise beside `ValueError`: a request that they do not run, a device that is
full or has failed.
"""

from __future__ import annotations


class Unsupported(ValueError):
    """A legal request that this backend does not run; nothing was changed."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value}: {rule}")
        self.field, self.value, self.rule = field, value, rule


class NoMemory(RuntimeError):
    """The device has no memory for a call now, and cannot make room; the call may be repeated."""


class DeviceLost(RuntimeError):
    """The device failed: its pool contents cannot be trusted and the process must be restarted."""
