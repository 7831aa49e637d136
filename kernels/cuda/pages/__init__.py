"""Whole pages between the pool and host memory, beside all other work."""
