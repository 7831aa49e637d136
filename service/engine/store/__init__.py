"""The engine's state: tree and pool, plans, events, marks, limits, and the pace of the device."""
