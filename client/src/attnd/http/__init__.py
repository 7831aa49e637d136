"""Calls over HTTP/1.1: how they are written, and the connections that carry them."""
