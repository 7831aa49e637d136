"""The engine: a bounded queue in front of the one thread that owns the pool and the device."""
