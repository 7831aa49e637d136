"""Calls over the road: a Unix socket for frames, and memory shared with the engine for images."""
