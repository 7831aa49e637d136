"""The engine: the one thread that owns the pool and the device, and its loop."""
