"""Handlers of operations, by what they are about; `table.py` lists them all."""
