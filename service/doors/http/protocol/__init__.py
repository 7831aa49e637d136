"""One HTTP/1.1 connection: heads, bodies, limits, authentication."""
