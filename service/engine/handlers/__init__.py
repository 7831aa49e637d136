"""Handlers of operations, by subject; `table.py` lists them all."""
