"""Doors: processes that speak a protocol of the outside and call the engine on the road."""
