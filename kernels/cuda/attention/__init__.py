"""Turns work items into launches: chooses a batch's kernels and runs them."""
