"""The CUDA backend: kernels (`*.cu`, `*.cuh`), the planner that feeds them, and their launches."""
