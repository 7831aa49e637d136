"""Puts this folder where tests of the folders below import its helpers from."""
