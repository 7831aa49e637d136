"""The loop of the engine: callers, turns, launches, slices, steps, and replies."""
