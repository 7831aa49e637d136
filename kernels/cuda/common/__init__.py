"""What several kernels share: instructions, state arithmetic, rows, formats."""
