"""Custom masks of steps, expanded on the device."""
