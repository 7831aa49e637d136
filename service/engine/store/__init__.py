"""What the engine owns: tree and pool, plans, events, marks, limits, and the pace of the device."""
