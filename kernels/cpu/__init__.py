"""The CPU backend (torch): the embedded default, and the readable reference."""

from kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
