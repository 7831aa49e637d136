"""Rows in and out of the pool."""
