"""Merges of attention states."""
