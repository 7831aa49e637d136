"""Backends: the pool on a device, and the kernels that read and write it."""
